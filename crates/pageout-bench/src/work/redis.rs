//! redis-server inside an engine; outside it a client that fills it and reads with Zipf keys.
//!
//! The client speaks the wire protocol itself over a Unix socket, since redis-benchmark has no Zipf
//! keys and checks no values. Each connection is a thread; one request at a time, as redis-benchmark
//! without pipelining.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use clap::Args;

use super::Report;
use crate::dist::{Rng, Sampler, Spread};
use crate::latency::Latencies;
use crate::pattern::{mix, Pattern};
use crate::units::{parse_time, Bytes};

/// Bytes of a value: a page's worth, less what Redis adds, so that values do not straddle by design.
const VALUE: usize = 1000;

/// Options of `redis`.
#[derive(Clone, Debug, Args)]
pub struct Redis {
    /// Data put in
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub data: Bytes,
    /// Connections that read at once
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=64))]
    clients: u64,
    /// How long to read
    #[arg(long, value_name = "TIME", default_value = "10", value_parser = parse_time)]
    seconds: Duration,
    /// How the keys are drawn
    #[arg(long, value_name = "DIST", default_value = "zipf")]
    spread: Spread,
    /// The server
    #[arg(long, value_name = "PATH", default_value = "/usr/bin/redis-server")]
    server: PathBuf,
}

impl Redis {
    /// The server's command line; its socket is named after this process and outlives no run.
    pub fn command(&self) -> Result<Vec<OsString>> {
        ensure!(
            self.server.exists(),
            "{}: no such program; give its path by --server",
            self.server.display()
        );
        let socket = Self::socket();
        let mut command: Vec<OsString> = vec![self.server.clone().into_os_string()];
        for word in ["--port", "0", "--save", "", "--appendonly", "no", "--loglevel", "warning"] {
            command.push(word.into());
        }
        command.extend(["--unixsocket".into(), socket.into_os_string()]);
        Ok(command)
    }

    /// Where the server of this process listens.
    pub fn socket() -> PathBuf {
        std::env::temp_dir().join(format!("pageout-bench.{}.redis", std::process::id()))
    }

    /// Starts a server without any engine around it, and drives it.
    pub fn run(&self) -> Result<Report> {
        let command = self.command()?;
        let mut server = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("starting {}", self.server.display()))?;
        let report = self.drive();
        // The server has ended by itself where `drive` came to its end.
        let _ = server.kill();
        server.wait().context("waiting for the server")?;
        let _ = std::fs::remove_file(Self::socket());
        report
    }

    /// Fills the server of this process, reads for the time asked, checks every value and ends it.
    pub fn drive(&self) -> Result<Report> {
        let socket = Self::socket();
        let keys = (self.data.0 / VALUE as u64).max(1);
        let mut first = Client::connect(&socket)?;
        let begun = Instant::now();
        first.fill(keys)?;
        let fill_time = begun.elapsed();
        let sampler = Sampler::new(self.spread, keys);
        let results: Vec<Latencies> = std::thread::scope(|scope| {
            let tasks: Vec<_> = (0..self.clients)
                .map(|task| {
                    let (sampler, socket) = (&sampler, &socket);
                    scope.spawn(move || -> Result<Latencies> {
                        let mut client = Client::connect(socket)?;
                        let mut rng = Rng::new(mix(task + 1));
                        let mut latencies = Latencies::new();
                        let begun = Instant::now();
                        while begun.elapsed() < self.seconds {
                            latencies.record(client.get(sampler.draw(&mut rng))?);
                        }
                        Ok(latencies)
                    })
                })
                .collect();
            tasks.into_iter().map(|task| task.join().expect("a client does not panic")).collect::<Result<_>>()
        })?;
        first.shut_down()?;
        let mut all = Latencies::new();
        results.iter().for_each(|latencies| all.add(latencies));
        let mut report = Report::default();
        report.set("redis.requests_per_s", all.count() as f64 / self.seconds.as_secs_f64());
        report.set("redis.fill_s", fill_time.as_secs_f64());
        all.tell("redis", &mut report.metrics);
        report.latency_ns = all.counts();
        Ok(report)
    }
}

/// One connection.
struct Client {
    stream: BufReader<UnixStream>,
    line: String,
    value: Vec<u8>,
}

/// The value of `key`: incompressible, told from any other key's.
fn value_of(key: u64, into: &mut Vec<u8>) {
    let pattern = Pattern::new(key, 0, 1);
    into.clear();
    into.extend((0..VALUE as u64 / 8).flat_map(|i| pattern.word(i).to_ne_bytes()));
}

impl Client {
    /// Connects, waiting up to 20 s for the server to come up.
    fn connect(socket: &Path) -> Result<Client> {
        let begun = Instant::now();
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
                    return Ok(Client {
                        stream: BufReader::new(stream),
                        line: String::new(),
                        value: Vec::new(),
                    });
                }
                Err(_) if begun.elapsed() < Duration::from_secs(20) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => return Err(error).context("redis-server does not answer on its socket"),
            }
        }
    }

    /// Sets all keys, many to a write.
    fn fill(&mut self, keys: u64) -> Result<()> {
        const BATCH: u64 = 64;
        let (mut requests, mut value) = (Vec::new(), Vec::new());
        for start in (0..keys).step_by(BATCH as usize) {
            let end = (start + BATCH).min(keys);
            requests.clear();
            for key in start..end {
                value_of(key, &mut value);
                let name = format!("{key:016}");
                write!(requests, "*3\r\n$3\r\nSET\r\n$16\r\n{name}\r\n${VALUE}\r\n")?;
                requests.extend_from_slice(&value);
                requests.extend_from_slice(b"\r\n");
            }
            self.stream.get_mut().write_all(&requests).context("filling redis-server")?;
            for _ in start..end {
                let reply = self.reply()?;
                ensure!(reply == "+OK", "redis-server answered {reply} to SET");
            }
        }
        Ok(())
    }

    fn reply(&mut self) -> Result<&str> {
        self.line.clear();
        let read = self.stream.read_line(&mut self.line).context("reading from redis-server")?;
        ensure!(read > 0, "redis-server closed the connection");
        Ok(self.line.trim_end())
    }

    /// Gets one key, checks its value, and gives the time from request to the whole reply.
    fn get(&mut self, key: u64) -> Result<Duration> {
        let request = format!("*2\r\n$3\r\nGET\r\n$16\r\n{key:016}\r\n");
        let begun = Instant::now();
        self.stream.get_mut().write_all(request.as_bytes()).context("asking redis-server")?;
        let reply = self.reply()?;
        if reply != format!("${VALUE}") {
            bail!("data error at key {key}: redis-server answered {reply}");
        }
        let mut got = [0; VALUE + 2];
        self.stream.read_exact(&mut got).context("reading from redis-server")?;
        let time = begun.elapsed();
        value_of(key, &mut self.value);
        ensure!(got[..VALUE] == self.value[..], "data error in the value of key {key}");
        Ok(time)
    }

    fn shut_down(&mut self) -> Result<()> {
        self.stream
            .get_mut()
            .write_all(b"*2\r\n$8\r\nSHUTDOWN\r\n$6\r\nNOSAVE\r\n")
            .context("ending redis-server")
    }
}
