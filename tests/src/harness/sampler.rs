//! Resident memory of a process, looked at every millisecond.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const PERIOD: Duration = Duration::from_millis(1);
const PAGE: usize = 4096;

/// What was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peak {
    /// The most that was resident at once, in bytes.
    pub bytes: usize,
    /// How often was looked.
    pub samples: usize,
    /// The longest time between two looks: what happened in it nobody saw.
    pub longest_gap: Duration,
}

/// A thread that looks until it is told to stop, or until the process is gone.
pub struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Peak>,
}

impl Sampler {
    /// Starts to look at processes, whose memory is added up.
    pub fn start(pids: &[u32]) -> Result<Self, String> {
        let open = |pid: &u32| {
            let path = format!("/proc/{pid}/statm");
            File::open(&path).map_err(|e| format!("{path}: {e}"))
        };
        let statm = pids.iter().map(open).collect::<Result<Vec<File>, String>>()?;
        let stop = Arc::new(AtomicBool::new(false));
        let mine = stop.clone();
        let thread = std::thread::spawn(move || look(&statm, &mine));
        Ok(Sampler { stop, thread })
    }

    /// Stops and says what was seen.
    pub fn stop(self) -> Peak {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

fn look(statm: &[File], stop: &AtomicBool) -> Peak {
    // The program under test keeps all CPUs busy; who looks must come first where that is allowed.
    // SAFETY: numbers only.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, libc::gettid() as libc::id_t, -15) };
    let mut peak = Peak::default();
    let mut last = Instant::now();
    let mut next = last;
    let mut buffer = [0; 128];
    while !stop.load(Ordering::Relaxed) {
        let mut look = |statm: &File| {
            let n = statm.read_at(&mut buffer, 0).ok()?;
            resident_pages(&buffer[..n])
        };
        // One that has ended has nothing any more.
        let seen: Vec<(usize, usize)> = statm.iter().filter_map(&mut look).collect();
        if seen.is_empty() {
            break;
        }
        // What is shared between several is not added up.
        let own = |(all, shared): &(usize, usize)| if seen.len() > 1 { all - shared.min(all) } else { *all };
        let pages: usize = seen.iter().map(own).sum();
        peak.bytes = peak.bytes.max(pages * PAGE);
        peak.samples += 1;
        peak.longest_gap = peak.longest_gap.max(last.elapsed());
        last = Instant::now();
        next += PERIOD;
        match next.checked_duration_since(last) {
            Some(left) => std::thread::sleep(left),
            None => next = last,
        }
    }
    peak
}

/// Resident pages, and those of them that are files' or shared memory.
fn resident_pages(statm: &[u8]) -> Option<(usize, usize)> {
    let mut words = std::str::from_utf8(statm).ok()?.split(' ').skip(1).map(|word| word.parse().ok());
    Some((words.next()??, words.next()??))
}
