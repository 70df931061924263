//! Databases in memory: SQLite with indexes, Redis filled and read back.

use super::redis::{self, Client};
use super::text::Numbers;
use super::{script, Invocation, Program, Size};
use anyhow::{ensure, Context, Result};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const VALUE_BYTES: usize = 1000;

pub(super) fn programs(size: Size) -> Vec<Program> {
    let rows = size.pick(350_000, 2_000_000);
    let keys = size.pick(120_000, 900_000);
    vec![
        Program::new("sqlite", |input| {
            Invocation::new("sqlite3").args("-batch :memory:").stdin(input.join("index.sql"))
        })
        .needs(&["sqlite3"])
        .input(move |dir| {
            let text = std::fs::read_to_string(script("index.sql"))?;
            Ok(std::fs::write(dir.join("index.sql"), text.replace("ROWS", &rows.to_string()))?)
        }),
        server("redis").driver(move |dir| read_back(dir, keys)),
        server("redis-save").driver(move |dir| save_and_load(dir, keys / 2)),
    ]
}

fn server(name: &'static str) -> Program {
    Program::new(name, |_| {
        Invocation::new("redis-server")
            .args("--port 0 --unixsocket redis.sock --appendonly no --logfile redis.log --daemonize no")
            .args("--enable-debug-command yes --save")
            .arg("")
    })
    .needs(&["redis-server", "redis-benchmark"])
}

/// Fills the server, reads every value back, lets `redis-benchmark` read at random, and asks the
/// server for the digest of all it holds.
fn read_back(dir: &Path, keys: usize) -> Result<Vec<u8>> {
    let mut client = Client::connect(dir)?;
    fill(&mut client, 0..keys, 0)?;
    verify(&mut client, 0..keys, 0)?;
    let benchmark = Command::new("redis-benchmark")
        .args(["-s", "redis.sock", "-t", "get,set", "-q", "-c", "8", "-d", "1000", "-n", "40000"])
        .args(["-r", &(keys / 10).to_string()])
        .current_dir(dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("redis-benchmark")?;
    ensure!(benchmark.success(), "redis-benchmark ended with {benchmark}");
    // The benchmark's own keys are chosen at random; what is left is the same on every run.
    for number in 0..keys / 10 {
        client.send(&[b"DEL", format!("key:{number:012}").as_bytes()]);
    }
    client.receive(keys / 10, |_, _| Ok(()))?;
    finish(client, dir)
}

/// Forks a child that writes a snapshot while the parent changes what it holds, then loads the
/// snapshot: what the child saw is what was there at the fork.
fn save_and_load(dir: &Path, keys: usize) -> Result<Vec<u8>> {
    let mut client = Client::connect(dir)?;
    fill(&mut client, 0..keys, 0)?;
    let before = client.call(&[b"DEBUG", b"DIGEST"])?;
    // A fork may fail for lack of memory; then nothing was started and the reply is an error.
    let forked = client.call(&[b"BGSAVE"]).is_ok();
    fill(&mut client, 0..keys / 2, 1)?;
    verify(&mut client, 0..keys / 2, 1)?;
    let saved = forked && snapshot_ended(&mut client)?;
    verify(&mut client, keys / 2..keys, 0)?;
    if saved {
        client.call(&[b"DEBUG", b"RELOAD", b"NOSAVE"])?;
        let loaded = client.call(&[b"DEBUG", b"DIGEST"])?;
        ensure!(loaded == before, "the snapshot of the forked child differs from what the parent held");
    }
    fill(&mut client, 0..keys, 2)?;
    finish(client, dir)
}

fn finish(mut client: Client, dir: &Path) -> Result<Vec<u8>> {
    let mut out = client.call(&[b"DEBUG", b"DIGEST"])?;
    out.push(b'\n');
    out.extend(client.call(&[b"DBSIZE"])?);
    client.shut_down(dir)?;
    Ok(out)
}

fn snapshot_ended(client: &mut Client) -> Result<bool> {
    let end = Instant::now() + Duration::from_secs(600);
    loop {
        let info = String::from_utf8_lossy(&client.call(&[b"INFO", b"persistence"])?).into_owned();
        if info.contains("rdb_bgsave_in_progress:0") {
            return Ok(info.contains("rdb_last_bgsave_status:ok"));
        }
        ensure!(Instant::now() < end, "the snapshot took over 600 s");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The value of a key: different for each key and round, half of it compressible.
fn value(number: usize, round: u64) -> Vec<u8> {
    let mut numbers = Numbers::new(number as u64 * 7 + round + 1);
    let mut bytes = vec![b'v'; VALUE_BYTES];
    for chunk in bytes[..VALUE_BYTES / 2].chunks_exact_mut(4) {
        chunk.copy_from_slice(&numbers.next().to_le_bytes()[2..6]);
    }
    bytes
}

fn key(number: usize) -> Vec<u8> {
    format!("item:{number}").into_bytes()
}

fn fill(client: &mut Client, keys: std::ops::Range<usize>, round: u64) -> Result<()> {
    redis::pipelined(
        client,
        keys,
        |client, number| {
            client.send(&[b"SET", &key(number), &value(number, round)]);
        },
        |_, reply| {
            ensure!(reply == b"OK", "SET answered {:?}", String::from_utf8_lossy(reply));
            Ok(())
        },
    )
}

fn verify(client: &mut Client, keys: std::ops::Range<usize>, round: u64) -> Result<()> {
    redis::pipelined(
        client,
        keys,
        |client, number| client.send(&[b"GET", &key(number)]),
        |number, reply| {
            ensure!(reply == value(number, round), "key {number} has a wrong value");
            Ok(())
        },
    )
}
