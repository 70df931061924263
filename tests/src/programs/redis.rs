//! As much of a Redis client as the tests need: pipelined commands over the server's socket.

use anyhow::{anyhow, bail, ensure, Context, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Commands in flight at once: enough to hide the round trips, less than a socket's buffers hold.
const PIPELINE: usize = 64;

pub(super) struct Client {
    replies: BufReader<UnixStream>,
    requests: UnixStream,
    pending: Vec<u8>,
}

impl Client {
    /// Connects to `redis.sock` in `dir`, waiting up to 30 s for the server to listen.
    pub(super) fn connect(dir: &Path) -> Result<Self> {
        // Through the descriptor of the directory: the path of a socket may have 107 bytes at most.
        let handle = File::open(dir)?;
        let path = format!("/proc/self/fd/{}/redis.sock", handle.as_raw_fd());
        let end = Instant::now() + Duration::from_secs(30);
        let stream = loop {
            match UnixStream::connect(&path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > end => {
                    return Err(error).context("redis-server does not listen")
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        Ok(Client { replies: BufReader::new(stream.try_clone()?), requests: stream, pending: Vec::new() })
    }

    /// Queues a command; [`Client::receive`] sends what is queued.
    pub(super) fn send(&mut self, words: &[&[u8]]) {
        self.pending.extend(format!("*{}\r\n", words.len()).bytes());
        for word in words {
            self.pending.extend(format!("${}\r\n", word.len()).bytes());
            self.pending.extend_from_slice(word);
            self.pending.extend_from_slice(b"\r\n");
        }
    }

    /// Sends what is queued and hands `count` replies to `each`, with their number.
    pub(super) fn receive(
        &mut self,
        count: usize,
        mut each: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        // The server reads on while its replies wait in its own memory, so this cannot block for good.
        let (requests, pending) = (&mut self.requests, std::mem::take(&mut self.pending));
        requests.write_all(&pending)?;
        for index in 0..count {
            let reply = read_reply(&mut self.replies)?;
            each(index, &reply)?;
        }
        Ok(())
    }

    /// One command and its reply.
    pub(super) fn call(&mut self, words: &[&[u8]]) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        self.send(words);
        self.receive(1, |_, reply| {
            out = reply.to_vec();
            Ok(())
        })?;
        Ok(out)
    }

    /// Ends the server without a snapshot.
    pub(super) fn shut_down(mut self, dir: &Path) -> Result<()> {
        self.send(&[b"SHUTDOWN", b"NOSAVE"]);
        // No reply: the server closes the connection.
        match self.receive(1, |_, reply| bail!("SHUTDOWN answered {:?}", String::from_utf8_lossy(reply))) {
            Err(error) if error.is::<std::io::Error>() => {}
            other => other?,
        }
        let _ = std::fs::remove_file(dir.join("redis.sock"));
        Ok(())
    }
}

/// Sends a command for each number and checks each reply, [`PIPELINE`] at a time.
pub(super) fn pipelined(
    client: &mut Client,
    numbers: Range<usize>,
    send: impl Fn(&mut Client, usize),
    check: impl Fn(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut start = numbers.start;
    while start < numbers.end {
        let end = (start + PIPELINE).min(numbers.end);
        (start..end).for_each(|number| send(client, number));
        client.receive(end - start, |index, reply| check(start + index, reply))?;
        start = end;
    }
    Ok(())
}

fn read_reply(stream: &mut BufReader<UnixStream>) -> Result<Vec<u8>> {
    let mut line = Vec::new();
    let count = stream.read_until(b'\n', &mut line)?;
    if count == 0 {
        return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
    }
    ensure!(line.ends_with(b"\r\n"), "a reply broke off");
    line.truncate(line.len() - 2);
    let rest = String::from_utf8_lossy(&line[1..]).into_owned();
    match line[0] {
        b'+' | b':' => Ok(rest.into_bytes()),
        b'-' => Err(anyhow!("redis-server: {rest}")),
        b'$' => {
            let Ok(length) = usize::try_from(rest.parse::<i64>()?) else { return Ok(Vec::new()) };
            let mut bytes = vec![0; length + 2];
            stream.read_exact(&mut bytes)?;
            bytes.truncate(length);
            Ok(bytes)
        }
        other => bail!("a reply of unknown type {:?}", other as char),
    }
}
