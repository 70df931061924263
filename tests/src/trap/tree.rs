//! Several programs under one limit.

use super::procs::own_program;
use super::span::PAGE;
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub const TRAPS: &[Trap] = &[
    Trap::new("tree", "three programs that fill and check at the same time", tree),
    Trap::new("tree-fork", "children that inherit memory, change a part of it and read the rest", tree_fork)
        .may_log(),
    Trap::new("tree-touch", "two programs that say their pids and touch --size of new memory", tree_touch)
        .helper(),
    Trap::new("tree-need", "idle with most of the limit while another program needs as much", tree_need)
        .helper(),
    Trap::new("member", "one of them: fills and checks --size, again and again", member).helper(),
    Trap::new("needy", "one of them: touches --size twice, and must keep most of it", needy).helper(),
];

/// This program's trap `name` with `size` bytes, and further words.
fn start(name: &str, size: usize, words: &[&str]) -> Result<Child, Stop> {
    let mut command = Command::new(own_program()?);
    command.args([name, "--size", &format!("{}M", size >> 20), "--seconds", "0.3"]).args(words);
    Ok(command.stdout(Stdio::piped()).spawn()?)
}

/// What it had left to say must end with `ok`.
fn finish(mut child: Child) -> Outcome {
    let mut said = String::new();
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut said)?;
    }
    let status = child.wait()?;
    ensure!(status.success() && said.ends_with("ok\n"), "a program ended with {status}: {said}");
    Ok(())
}

fn tree(ctx: &Ctx) -> Outcome {
    let members: Vec<Child> =
        (0..3).map(|_| start("member", ctx.size / 3, &[])).collect::<Result<_, Stop>>()?;
    members.into_iter().try_for_each(finish)
}

fn member(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size / PAGE * PAGE)?;
    field.fill(1);
    let deadline = ctx.deadline();
    let mut generation = 1;
    while generation < 3 || Instant::now() < deadline {
        field.check(generation)?;
        generation = generation % 1000 + 1;
        field.fill(generation);
    }
    field.check(generation)
}

fn tree_fork(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size / 8)?;
    field.fill(1);
    let (changed, same) = field.halves();
    for generation in 2..5 {
        let mut children = Vec::new();
        for _ in 0..3 {
            let child = sys::fork(|| {
                changed.fill(1000 + generation);
                let own = sys::map(ctx.size / 8)?;
                own.fill(generation);
                same.check(1)?;
                changed.check(1000 + generation)?;
                own.check(generation)
            });
            match child {
                Ok(child) => children.push(child),
                Err(_) if sys::errno() == libc::ENOMEM => break,
                Err(stop) => return Err(stop),
            }
        }
        ensure!(!children.is_empty(), "no child could be made");
        field.check(1)?;
        children.into_iter().try_for_each(|child| sys::wait_for(child, 0))?;
    }
    let ballast = sys::map(ctx.size / 2)?;
    ballast.fill(9);
    field.check(1)?;
    ballast.check(9)
}

fn tree_touch(ctx: &Ctx) -> Outcome {
    let mut children = Vec::new();
    let mut pids = String::new();
    for _ in 0..2 {
        let mut child = start("touch", ctx.size, &["mmap"])?;
        let mut line = String::new();
        let out = child.stdout.take().map(|out| BufReader::with_capacity(1, out));
        let mut out = out.ok_or_else(|| Stop::Wrong("no standard output".into()))?;
        out.read_line(&mut line)?;
        pids += line.trim_end().trim_start_matches("pid");
        child.stdout = Some(out.into_inner());
        children.push(child);
    }
    println!("pid{pids}");
    std::io::stdout().flush()?;
    children.into_iter().try_for_each(finish)
}

fn tree_need(ctx: &Ctx) -> Outcome {
    let limit = ctx.size / 4;
    let field = sys::map(limit / 10 * 9 / PAGE * PAGE)?;
    field.fill(1);
    // Idle, and no longer new.
    std::thread::sleep(Duration::from_millis(300));
    finish(start("needy", limit / 10 * 6, &[])?)?;
    field.check(1)
}

fn needy(ctx: &Ctx) -> Outcome {
    let field = sys::map(ctx.size / PAGE * PAGE)?;
    field.fill(1);
    // Rarely is 100 ms exact on a machine that does other things.
    std::thread::sleep(Duration::from_millis(100));
    field.check(1)?;
    let resident = sys::resident(field)?;
    ensure!(resident * 2 >= field.pages(), "has {resident} of its {} pages", field.pages());
    Ok(())
}
