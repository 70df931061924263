//! Programs of many processes, under one limit: workers that inherit, a web server, a build, a database.

use super::compile::TEMPLATES;
use super::runtimes::PYTHON;
use super::{script, Invocation, Program, Size};
use anyhow::{ensure, Context, Result};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Clients that ask the web server at the same time.
const CLIENTS: usize = 4;
/// Files that `make` compiles.
const FILES: usize = 4;
const OBJECTS: [&str; FILES] = ["part0.o", "part1.o", "part2.o", "part3.o"];

pub(super) fn programs(size: Size) -> Vec<Program> {
    let inherited = size.pick(100, 1536);
    let shop = size.pick(80, 512);
    let requests = size.pick(150, 1000);
    let instances = size.pick(3, 40);
    let rows = size.pick(40_000, 400_000);
    let initdb = initdb();
    vec![
        Program::new("inherited", move |_| {
            let words = [inherited, 4].map(|number: u64| number.to_string());
            Invocation::new(PYTHON).arg(script("inherited.py")).arg(&words[0]).arg(&words[1])
        })
        .needs(&[PYTHON])
        .tree(3),
        Program::new("gunicorn", move |_| {
            Invocation::new("gunicorn")
                .args("--workers 4 --preload --bind unix:shop.sock --pid shop.pid --timeout 600 --log-level error")
                .arg("--pythonpath")
                .arg(script("."))
                .args("shop:application")
                .env("SHOP_MIB", shop.to_string())
                .env("PYTHONDONTWRITEBYTECODE", "1")
        })
        .needs(&["gunicorn"])
        .driver(move |dir| shopping(dir, requests))
        .tree(3),
        Program::new("make", |input| Invocation::new("make").args("-j4 -s -f").arg(input.join("Makefile")))
            .needs(&["make", "g++"])
            .input(move |dir| sources(dir, instances))
            .outputs(&OBJECTS)
            .tree(3),
        Program::new("postgres", move |_| {
            Invocation::new("sh").arg(script("postgres.sh")).arg(initdb).arg(rows.to_string())
        })
        .needs(&[initdb, "psql", "pgbench", "unshare"])
        .tree(3),
    ]
}

/// Where the distribution keeps it, not in PATH.
fn initdb() -> &'static str {
    let mut places = (10..30).map(|version| format!("/usr/lib/postgresql/{version}/bin/initdb"));
    places.find(|place| Path::new(place).exists()).map_or("initdb", |place| place.leak())
}

/// Asks a web server that forks its workers for pages, by several clients; what they got, in order.
fn shopping(dir: &Path, requests: usize) -> Result<Vec<u8>> {
    let pages: Vec<Result<Vec<u8>>> = std::thread::scope(|scope| {
        let clients = (0..CLIENTS).map(|client| {
            scope.spawn(move || {
                let numbers = client * requests..(client + 1) * requests;
                numbers
                    .map(|number| page(dir, number))
                    .collect::<Result<Vec<_>>>()
                    .map(|pages| pages.concat())
            })
        });
        let clients: Vec<_> = clients.collect();
        clients.into_iter().map(|client| client.join().expect("a client does not panic")).collect()
    });
    let pid: libc::pid_t = std::fs::read_to_string(dir.join("shop.pid"))?.trim().parse()?;
    // SAFETY: a process of the run, which was not waited for.
    ensure!(unsafe { libc::kill(pid, libc::SIGTERM) } == 0, "the server has gone");
    Ok(pages.into_iter().collect::<Result<Vec<_>>>()?.concat())
}

fn page(dir: &Path, number: usize) -> Result<Vec<u8>> {
    // Through the descriptor of the directory: the path of a socket may have 107 bytes at most.
    let handle = File::open(dir)?;
    let path = format!("/proc/self/fd/{}/shop.sock", handle.as_raw_fd());
    let end = Instant::now() + Duration::from_secs(60);
    let mut stream = loop {
        match UnixStream::connect(&path) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > end => return Err(error).context("the server does not listen"),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    write!(stream, "GET /{number} HTTP/1.0\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let body = answer.windows(4).position(|window| window == b"\r\n\r\n").map_or(answer.len(), |at| at + 4);
    ensure!(answer.starts_with(b"HTTP/1.0 200"), "page {number}: {:?}", String::from_utf8_lossy(&answer));
    Ok(answer.split_off(body))
}

/// A project of several files.
fn sources(dir: &Path, instances: usize) -> Result<()> {
    let mut makefile = format!("all: {}\n", OBJECTS.join(" "));
    for (number, object) in OBJECTS.iter().enumerate() {
        let source = dir.join(format!("part{number}.cc"));
        let text = TEMPLATES.replace("INSTANCES", &(instances + number).to_string());
        std::fs::write(&source, text.replace("ENTRIES", "1000"))?;
        writeln!(makefile, "{object}:\n\tg++ -std=c++17 -O1 -c -o $@ {}", source.display())?;
    }
    Ok(std::fs::write(dir.join("Makefile"), makefile)?)
}
