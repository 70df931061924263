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
    let rows = size.pick(200_000, 2_000_000);
    let keys = size.pick(100_000, 900_000);
    let snapshots = size.pick(3, 20);
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
        server("redis-bgsave")
            .driver(move |dir| save_in_a_loop(dir, keys / 2, snapshots))
            .verify(move |dir| load_all(dir, keys / 2, snapshots))
            .tree(3),
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

/// The key of a write, by its number: at random, but for the first ones, which make all keys.
fn target(write: usize, keys: usize) -> usize {
    if write < keys {
        write
    } else {
        Numbers::new(write as u64).next() as usize % keys
    }
}

/// Writes without a pause, numbered, each with its number in `last`; takes snapshot after snapshot meanwhile, and notes
/// between which writes.
fn save_in_a_loop(dir: &Path, keys: usize, snapshots: usize) -> Result<Vec<u8>> {
    let mut client = Client::connect(dir)?;
    let mut written = 0;
    let mut write = |client: &mut Client, count: usize| -> Result<()> {
        let numbers = written..written + count;
        written = numbers.end;
        let send = |client: &mut Client, n: usize| {
            let key = key(target(n, keys));
            client.send(&[b"MSET", &key, &value(n, 0), b"last", n.to_string().as_bytes()]);
        };
        redis::pipelined(client, numbers, send, |_, reply| {
            ensure!(reply == b"OK", "MSET failed");
            Ok(())
        })
    };
    write(&mut client, keys)?;
    let mut at = String::new();
    for snapshot in 0..snapshots {
        write(&mut client, keys / 10)?;
        // The fork is at this command; none is in flight.
        client.call(&[b"BGSAVE"])?;
        at += &String::from_utf8(client.call(&[b"GET", b"last"])?)?;
        at += "\n";
        let mut going = true;
        while going {
            write(&mut client, 1000)?;
            let info = String::from_utf8_lossy(&client.call(&[b"INFO", b"persistence"])?).into_owned();
            going = info.contains("rdb_bgsave_in_progress:1");
            ensure!(going || info.contains("rdb_last_bgsave_status:ok"), "snapshot {snapshot} failed");
        }
        std::fs::rename(dir.join("dump.rdb"), dir.join(format!("{snapshot}.rdb")))?;
    }
    std::fs::write(dir.join("snapshots"), at)?;
    verify_writes(&mut client, keys, written - 1)?;
    client.shut_down(dir)?;
    Ok(Vec::new())
}

/// Loads every snapshot into a server of its own: it must hold what was there at the fork, no write more or less.
fn load_all(dir: &Path, keys: usize, snapshots: usize) -> Result<()> {
    let at = std::fs::read_to_string(dir.join("snapshots"))?;
    ensure!(at.lines().count() == snapshots, "{} snapshots", at.lines().count());
    for (snapshot, last) in at.lines().enumerate() {
        let mut server = Command::new("redis-server")
            .args("--port 0 --unixsocket redis.sock --logfile loaded.log --save".split(' '))
            .arg("")
            .args(["--dbfilename", &format!("{snapshot}.rdb")])
            .current_dir(dir)
            .spawn()?;
        let loaded = (|| -> Result<()> {
            let mut client = Client::connect(dir)?;
            while client.call(&[b"GET", b"last"]).is_err_and(|error| error.to_string().contains("LOADING")) {
                std::thread::sleep(Duration::from_millis(10));
            }
            verify_writes(&mut client, keys, last.parse()?)?;
            client.shut_down(dir)
        })();
        let _ = server.kill();
        server.wait()?;
        loaded.with_context(|| format!("snapshot {snapshot}, taken after write {last}"))?;
    }
    Ok(())
}

/// The server holds the writes up to `last` and nothing else.
fn verify_writes(client: &mut Client, keys: usize, last: usize) -> Result<()> {
    let found = client.call(&[b"GET", b"last"])?;
    ensure!(found == last.to_string().as_bytes(), "last is {:?}", String::from_utf8_lossy(&found));
    let size = client.call(&[b"DBSIZE"])?;
    ensure!(size == (keys + 1).to_string().as_bytes(), "{} keys", String::from_utf8_lossy(&size));
    let mut newest = vec![0; keys];
    (0..=last).for_each(|write| newest[target(write, keys)] = write);
    redis::pipelined(
        client,
        0..keys,
        |client, number| client.send(&[b"GET", &key(number)]),
        |number, reply| {
            let write = newest[number];
            ensure!(reply == value(write, 0), "key {number} does not have the value of write {write}");
            Ok(())
        },
    )
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
