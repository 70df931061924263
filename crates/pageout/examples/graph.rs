//! Walks a graph that is four times as large as the memory it may take, breadth first.
//!
//! The edges lie in a region and leave when others are needed; the marks of the walk, which every step looks at, are
//! pinned.
//!
//! ```text
//! cargo run --release -p pageout --example graph -- 64M
//! ```

use pageout::{Bytes, Swap};
use std::error::Error;
use std::time::Instant;

const DEGREE: usize = 16;

fn main() -> Result<(), Box<dyn Error>> {
    let memory: Bytes = std::env::args().nth(1).as_deref().unwrap_or("64M").parse()?;
    let swap = Swap::builder().memory(memory).build()?;
    let nodes = 4 * memory.0 as usize / size_of::<[u32; DEGREE]>();

    // Each node leads to the next ones, and some lead far away.
    let mut graph = swap.map(nodes * size_of::<[u32; DEGREE]>())?;
    let mut random = 1u64;
    for (node, edges) in graph.as_mut_slice::<[u32; DEGREE]>().iter_mut().enumerate() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        for (n, edge) in edges.iter_mut().enumerate() {
            let far = n == 0 && random >> 48 == 0;
            let to = if far { (random >> 8) as usize } else { node + n + 1 };
            *edge = (to % nodes) as u32;
        }
        // So that all can be reached.
        edges[1] = ((node + 1) % nodes) as u32;
    }

    let mut marks = swap.map(nodes)?;
    let _pinned = marks.pin(0..nodes)?;
    let mark = marks.as_mut_slice::<u8>();
    let edges = graph.as_slice::<[u32; DEGREE]>();

    let started = Instant::now();
    let (mut front, mut depth, mut seen) = (vec![0u32], 0, 1);
    mark[0] = 1;
    while !front.is_empty() {
        let mut next = Vec::new();
        // Ascending: neighbours in the graph lie together in memory.
        front.sort_unstable();
        for node in front {
            for to in edges[node as usize] {
                if mark[to as usize] == 0 {
                    mark[to as usize] = 1;
                    seen += 1;
                    next.push(to);
                }
            }
        }
        front = next;
        depth += 1;
    }

    assert_eq!(seen, nodes, "every node leads on to the next");
    println!(
        "reached {nodes} nodes ({}) in {memory}: {depth} steps, {:.1} s",
        Bytes(graph.len() as u64),
        started.elapsed().as_secs_f64()
    );
    Ok(())
}
