//! Evicted memory in the hands of the kernel and of other processes: direct I/O, pipes, sockets,
//! resource limits, and readers from outside.

use super::load::{together, Churn, Dice};
use super::procs::own_program;
use super::span::{bytes_of, Span, BLOCK, PAGE};
use super::{ensure, sys, Ctx, Outcome, Stop, Trap};
use libc::c_void;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

pub const TRAPS: &[Trap] = &[
    Trap::new("direct-read", "O_DIRECT reads into memory that is being evicted", direct_read),
    Trap::new("direct-write", "O_DIRECT writes from memory that is being evicted", direct_write),
    Trap::new("file-io", "pread, pwrite, readv and writev on evicted buffers", file_io),
    Trap::new("pipe-io", "a pipe between two evicted buffers", pipe_io),
    Trap::new("socket-io", "a socket pair between two evicted buffers", socket_io),
    Trap::new("zerocopy", "TCP with MSG_ZEROCOPY from memory that is being evicted", zerocopy),
    Trap::new("xdp", "evicted memory is registered with sockets for the frames of a network device", xdp),
    Trap::new("vmsplice", "pages lent to a pipe, evicted, read later", vmsplice),
    Trap::new("rlimit-as", "little address space more than the program itself needs", rlimit_as),
    Trap::new(
        "rlimit-as-round",
        "a little more address space than a program of its size needs",
        rlimit_as_round,
    ),
    Trap::new(
        "rlimit-as-again",
        "the same, with the highest limit as it was read, which it has no right to raise",
        rlimit_as_again,
    ),
    Trap::new("rlimit-nofile", "no descriptor beyond the seventh", rlimit_nofile),
    Trap::new("rlimit-fsize", "no file longer than 4 KiB, from the start", rlimit_fsize),
    Trap::new("rlimit-late", "all three limits when memory is out already", rlimit_late),
    Trap::new("peeked", "another process reads evicted memory by process_vm_readv and /proc", peeked)
        .may_log(),
    Trap::new("peeked-whole", "everything that is mapped for reading and writing is read", peeked_whole),
    Trap::new("poked", "another process writes evicted memory by process_vm_writev", poked).may_log(),
    Trap::new("peeked-stopped", "another process reads while this one is stopped", peeked_stopped).may_log(),
    Trap::new("traced", "a tracer attaches to all threads and reads", traced).may_log(),
    Trap::new("gdb", "gdb reads evicted memory", gdb).may_log(),
    Trap::new("peek", "PID ADDRESS LEN GENERATION [HOW]: checks memory of another process", peek).helper(),
];

/// Where words come from that travel through files.
const ORIGIN: usize = 0x100_0000;
const CAP_SYS_RESOURCE: u32 = 24;

fn direct_file() -> Result<OwnedFd, Stop> {
    sys::scratch_file(libc::O_DIRECT).map_err(|_| {
        Stop::Skip("no O_DIRECT in the temporary directory; set TMPDIR to a directory on a disk".into())
    })
}

fn direct_read(ctx: &Ctx) -> Outcome {
    let file = direct_file()?;
    let file_len = 8 * BLOCK;
    let source = sys::map(file_len)?;
    source.fill_as(ORIGIN, 1);
    sys::pwrite_span(file.as_raw_fd(), source, 0)?;
    sys::unmap(source)?;
    let churn = Churn::start(ctx.half())?;
    let field = sys::map_aligned(ctx.half(), BLOCK)?;
    field.fill(1);
    let deadline = ctx.deadline();
    together(2, |index| {
        let mine = if index == 0 { field.halves().0 } else { field.halves().1 };
        let mut dice = Dice::new(index);
        while Instant::now() < deadline {
            let len = PAGE << dice.roll(9);
            let to = mine.part(dice.roll((mine.len - len) / PAGE + 1) * PAGE, len);
            let from = dice.roll((file_len - len) / PAGE + 1) * PAGE;
            sys::pread_span(file.as_raw_fd(), to, from)?;
            to.check_as(ORIGIN + from, 1)?;
            to.fill(1);
        }
        mine.check(1)
    })?;
    churn.end()
}

fn direct_write(ctx: &Ctx) -> Outcome {
    let file = direct_file()?;
    let churn = Churn::start(ctx.half())?;
    let field = sys::map_aligned(ctx.half(), BLOCK)?;
    let deadline = ctx.deadline();
    field.fill(1);
    together(2, |index| {
        let mine = if index == 0 { field.halves().0 } else { field.halves().1 };
        let buffer = sys::map(1 << 20)?;
        let at = index * BLOCK;
        let mut dice = Dice::new(index);
        while Instant::now() < deadline {
            let from = mine.part(dice.roll((mine.len - buffer.len) / PAGE) * PAGE, buffer.len);
            sys::pwrite_span(file.as_raw_fd(), from, at)?;
            sys::pread_span(file.as_raw_fd(), buffer, at)?;
            buffer.check_as(from.start, 1)?;
        }
        mine.check(1)
    })?;
    churn.end()
}

fn file_io(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (from, to) = field.halves();
    let file = sys::scratch_file(0)?;
    // Out of evicted memory, into evicted memory.
    for piece in from.pieces(1 << 20) {
        sys::pwrite_span(file.as_raw_fd(), piece, piece.start - from.start)?;
    }
    ballast.walk()?;
    for piece in to.pieces(1 << 20) {
        sys::pread_span(file.as_raw_fd(), piece, piece.start - to.start)?;
    }
    to.pieces(1 << 20).try_for_each(|piece| piece.check_as(from.start + (piece.start - to.start), 1))?;
    to.fill(2);
    ballast.walk()?;
    // Vectors of single pages far apart.
    let vector = |span: Span| -> Vec<libc::iovec> {
        span.pieces(span.len / 64 / PAGE * PAGE)
            .take(64)
            .map(|piece| libc::iovec { iov_base: piece.as_ptr(), iov_len: PAGE })
            .collect()
    };
    let (out, back) = (vector(from), vector(to));
    // SAFETY: the vectors name memory of ours.
    unsafe {
        sys::whole("pwritev", libc::pwritev(file.as_raw_fd(), out.as_ptr(), 64, 0), 64 * PAGE)?;
        sys::whole("preadv", libc::preadv(file.as_raw_fd(), back.as_ptr(), 64, 0), 64 * PAGE)?;
    }
    for (a, b) in out.iter().zip(&back) {
        Span::new(b.iov_base as usize, PAGE).check_as(a.iov_base as usize, 1)?;
        Span::new(b.iov_base as usize, PAGE).fill(2);
    }
    ballast.walk()?;
    from.check(1)?;
    to.check(2)
}

/// Sends `from` through the descriptors into `to`, both evicted.
fn carry(from: Span, to: Span, write_end: RawFd, read_end: RawFd) -> Outcome {
    together(
        2,
        |index| {
            if index == 0 {
                sys::write_span(write_end, from)
            } else {
                sys::read_span(read_end, to)
            }
        },
    )?;
    to.check_as(from.start, 1)
}

fn pipe_io(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (from, to) = field.halves();
    let (read_end, write_end) = sys::pipe()?;
    let len = from.len.min(to.len);
    for _ in 0..2 {
        carry(from.part(0, len), to.part(0, len), write_end.as_raw_fd(), read_end.as_raw_fd())?;
        ballast.walk()?;
    }
    Ok(())
}

fn socket_io(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (from, to) = field.halves();
    let (one, other) = std::os::unix::net::UnixStream::pair()?;
    let len = from.len.min(to.len);
    carry(from.part(0, len), to.part(0, len), one.as_raw_fd(), other.as_raw_fd())?;
    ballast.walk()?;
    to.part(0, len).check_as(from.start, 1)
}

fn zerocopy(ctx: &Ctx) -> Outcome {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let out = TcpStream::connect(listener.local_addr()?)?;
    let (incoming, _) = listener.accept()?;
    let set = |on: libc::c_int| {
        let len = std::mem::size_of_val(&on) as libc::socklen_t;
        let on = (&raw const on).cast();
        // SAFETY: the option is an integer.
        unsafe { libc::setsockopt(out.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ZEROCOPY, on, len) }
    };
    sys::ret("setsockopt of none", set(0))?;
    // When it is refused, programs send as usual, and so does this.
    let zerocopy = set(1) == 0;
    ensure!(!(zerocopy && sys::under_pageout()), "SO_ZEROCOPY was not refused");
    let flags = if zerocopy { libc::MSG_ZEROCOPY } else { 0 };
    let (field, mut ballast) = ctx.evicted()?;
    let buffer = sys::map(256 << 10)?;
    for (index, piece) in field.pieces(128 << 10).step_by(7).enumerate() {
        // SAFETY: the piece is ours and stays as it is until it was received.
        let n = unsafe { libc::send(out.as_raw_fd(), piece.as_ptr(), piece.len, flags) };
        if n == -1 && sys::errno() == libc::ENOBUFS {
            return Err(Stop::Skip("too little memory may be locked for MSG_ZEROCOPY".into()));
        }
        sys::whole("send", n, piece.len)?;
        // It waits in the socket while its page may leave.
        if index % 4 == 0 {
            ballast.walk()?;
        }
        sys::read_span(incoming.as_raw_fd(), buffer.part(0, piece.len))?;
        buffer.part(0, piece.len).check_as(piece.start, 1)?;
    }
    ballast.walk()?;
    field.check(1)
}

fn xdp(ctx: &Ctx) -> Outcome {
    const AREA: usize = 256 << 10;
    let open = || {
        // SAFETY: takes numbers.
        match unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW, 0) } {
            -1 => Err(Stop::Skip(format!("sockets of AF_XDP: {}", std::io::Error::last_os_error()))),
            // SAFETY: new, and only ours.
            fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        }
    };
    let set = |socket: &OwnedFd, told: *const c_void| {
        let (fd, len) = (socket.as_raw_fd(), size_of::<libc::xdp_umem_reg>() as u32);
        // SAFETY: the kernel looks whether it may read what is told.
        match unsafe { libc::setsockopt(fd, libc::SOL_XDP, libc::XDP_UMEM_REG, told, len) } {
            0 => Ok(()),
            _ => Err(sys::errno()),
        }
    };
    let register = |socket: &OwnedFd, area: Span| {
        let (chunk_size, headroom, flags, tx_metadata_len) = (PAGE as u32, 0, 0, 0);
        let (addr, len) = (area.start as u64, area.len as u64);
        let told = libc::xdp_umem_reg { addr, len, chunk_size, headroom, flags, tx_metadata_len };
        set(socket, (&raw const told).cast())
    };
    open()?;
    let (field, mut ballast) = ctx.evicted()?;
    for area in field.pieces(field.len / 16).map(|piece| piece.part(0, AREA)) {
        let socket = open()?;
        match register(&socket, area) {
            Err(libc::ENOBUFS) => return Err(Stop::Skip("too little memory may be locked for XDP".into())),
            done => ensure!(done == Ok(()), "XDP_UMEM_REG: error {done:?}"),
        }
        // It is pinned, and may not leave.
        ballast.walk()?;
        area.check(1)?;
    }
    let page = sys::map(PAGE)?;
    sys::protect(page, libc::PROT_READ)?;
    let socket = open()?;
    ensure!(register(&socket, page) == Err(libc::EFAULT), "memory that may be read only was registered");
    ensure!(set(&socket, std::ptr::null()) == Err(libc::EFAULT), "nothing was registered");
    field.check(1)
}

fn vmsplice(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let (read_end, write_end) = sys::pipe()?;
    let buffer = sys::map(64 << 10)?;
    let step = (field.len / 4).max(buffer.len);
    for from in field.pieces(step).map(|piece| piece.part(0, buffer.len)) {
        let vector = libc::iovec { iov_base: from.as_ptr(), iov_len: from.len };
        // SAFETY: the vector names memory of ours.
        let n = unsafe { libc::vmsplice(write_end.as_raw_fd(), &vector, 1, 0) };
        let sent = sys::ret("vmsplice", n as i64)? as usize;
        // The pages leave, and their frames serve others, while the pipe still holds them.
        ballast.walk()?;
        sys::read_span(read_end.as_raw_fd(), buffer.part(0, sent))?;
        buffer.part(0, sent / 8 * 8).check_as(from.start, 1)?;
    }
    // More than the pipe takes: as much as it does, for who would splice it on has no other thread.
    let all = libc::iovec { iov_base: field.as_ptr(), iov_len: field.len };
    // SAFETY: the vector names memory of ours.
    let n = unsafe { libc::vmsplice(write_end.as_raw_fd(), &all, 1, 0) };
    let sent = sys::ret("vmsplice", n as i64)? as usize;
    ensure!(sent <= buffer.len, "{sent} bytes in a pipe that takes {}", buffer.len);
    sys::read_span(read_end.as_raw_fd(), buffer.part(0, sent))?;
    buffer.part(0, sent / 8 * 8).check_as(field.start, 1)?;
    // It goes by its own flags whether it waits, and not by the pipe's.
    // SAFETY: our own descriptor; the vector names memory of ours.
    let send = || unsafe {
        libc::fcntl(write_end.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK);
        sys::ret("vmsplice", libc::vmsplice(write_end.as_raw_fd(), &all, 1, 0) as i64)
    };
    let sent = send()? as usize;
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            sys::read_span(read_end.as_raw_fd(), buffer.part(0, sent))
        });
        send()?;
        reader.join().expect("no panic")
    })?;
    field.check(1)
}

fn address_space() -> Result<usize, Stop> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages: Option<usize> = statm.split(' ').next().and_then(|word| word.parse().ok());
    pages.map(|pages| pages * PAGE).ok_or(Stop::Wrong("statm cannot be read".into()))
}

/// Fills and checks twice over, with ballast, after a limit was set.
fn work_on(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    field.check(1)?;
    field.fill(2);
    ballast.walk()?;
    field.check(2)
}

fn rlimit_as(ctx: &Ctx) -> Outcome {
    let limit = address_space()? + ctx.size + ctx.size / 8;
    sys::set_limit(libc::RLIMIT_AS, limit as u64)?;
    work_on(ctx)?;
    // The engine's part comes on top of what was asked for.
    ensure!(
        sys::map(ctx.size + (1 << 30)).is_err(),
        "more was mapped than the limit on address space allows"
    );
    Ok(())
}

/// A figure that knows of no engine.
fn round_limit(ctx: &Ctx) -> u64 {
    (ctx.size + ctx.size / 8 + (32 << 20)) as u64
}

fn rlimit_as_round(ctx: &Ctx) -> Outcome {
    sys::set_limit(libc::RLIMIT_AS, round_limit(ctx))?;
    work_on(ctx)
}

fn rlimit_as_again(ctx: &Ctx) -> Outcome {
    sys::set_limit(libc::RLIMIT_AS, 4 << 30)?;
    sys::give_up_right(CAP_SYS_RESOURCE)?;
    sys::set_soft_limit(libc::RLIMIT_AS, round_limit(ctx))?;
    work_on(ctx)
}

fn rlimit_nofile(ctx: &Ctx) -> Outcome {
    sys::set_limit(libc::RLIMIT_NOFILE, 7)?;
    work_on(ctx)?;
    let files: Vec<_> = (0..8).map_while(|_| std::fs::File::open("/dev/null").ok()).collect();
    ensure!(files.len() < 8, "more files were opened than the limit allows");
    ensure!(!files.is_empty(), "no descriptor is left of seven");
    Ok(())
}

fn ignore_file_size_signal() {
    // SAFETY: the program itself gets EFBIG instead; the engine must do without this.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

fn check_file_limit() -> Outcome {
    ignore_file_size_signal();
    let file = sys::scratch_file(0)?;
    let page = sys::map(2 * PAGE)?;
    ensure!(sys::pwrite_span(file.as_raw_fd(), page, 0).is_err(), "a file grew beyond its limit");
    Ok(())
}

fn rlimit_fsize(ctx: &Ctx) -> Outcome {
    sys::set_limit(libc::RLIMIT_FSIZE, PAGE as u64)?;
    work_on(ctx)?;
    check_file_limit()
}

fn rlimit_late(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    sys::set_limit(libc::RLIMIT_FSIZE, PAGE as u64)?;
    sys::set_limit(libc::RLIMIT_NOFILE, 7)?;
    let limit = (address_space()? + BLOCK) as u64;
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // By its number, as who knows no libc (Python's ctypes).
    // SAFETY: the structure is whole.
    sys::ret("prlimit64", unsafe { libc::syscall(libc::SYS_prlimit64, 0, libc::RLIMIT_AS, &limit, 0) })?;
    for generation in 2..4 {
        field.check(generation - 1)?;
        field.fill(generation);
        ballast.walk()?;
    }
    field.check(3)?;
    check_file_limit()
}

/// Starts this program as one that looks at our memory, and waits for what it finds.
fn look_at(span: Span, generation: u16, how: &str) -> Outcome {
    // SAFETY: lets any process of the same user look, where the system asks for that.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, -1 as libc::c_long) };
    let words = [std::process::id() as usize, span.start, span.len, generation.into()];
    let out = Command::new(own_program()?)
        .arg("peek")
        .args(words.map(|word| word.to_string()))
        .arg(how)
        .stdin(Stdio::null())
        .output()?;
    ensure!(
        out.status.success(),
        "the process that looked says: {} {}",
        String::from_utf8_lossy(&out.stdout).trim(),
        String::from_utf8_lossy(&out.stderr).trim()
    );
    Ok(())
}

fn peeked(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    look_at(field, 1, "vm")?;
    ballast.walk()?;
    look_at(field, 1, "mem")?;
    ballast.walk()?;
    field.check(1)
}

fn poked(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    look_at(field, 7, "write")?;
    ballast.walk()?;
    field.check(7)
}

fn peeked_stopped(ctx: &Ctx) -> Outcome {
    let (field, _ballast) = ctx.evicted()?;
    look_at(field, 1, "stopped")?;
    field.check(1)
}

fn traced(ctx: &Ctx) -> Outcome {
    let churn = Churn::start(ctx.half())?;
    let field = sys::map(ctx.half())?;
    field.fill(1);
    look_at(field, 1, "trace")?;
    churn.end()?;
    field.check(1)
}

fn gdb(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    // SAFETY: as in `look_at`.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, -1 as libc::c_long) };
    let places: Vec<_> = field.pieces(field.len / 16).map(|piece| piece.start + 16).collect();
    let mut gdb = Command::new("gdb");
    // The debugger is no part of what is limited: its code alone fills a small limit.
    gdb.env_remove("LD_PRELOAD").args(["-nx", "-batch", "-p", &std::process::id().to_string()]);
    places.iter().for_each(|place| {
        gdb.args(["-ex", &format!("printf \"word {place} %lu\\n\", *(unsigned long*){place}")]);
    });
    let out = match gdb.stdin(Stdio::null()).output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Stop::Skip("there is no gdb".into()));
        }
        out => out?,
    };
    let text = String::from_utf8_lossy(&out.stdout);
    let said = String::from_utf8_lossy(&out.stderr);
    for place in places {
        // What it printed before it failed is on the line of its next word.
        let read = text
            .lines()
            .filter_map(|line| line.rsplit("word ").next()?.strip_prefix(&format!("{place} ")))
            .find_map(|word| word.trim().parse::<u64>().ok());
        let right = super::span::pattern(place, 1);
        match read {
            Some(word) => {
                ensure!(word == right, "gdb read {word} at {place:#x}, not {right}")
            }
            // Its way in is refused where a page is out.
            None => ensure!(
                said.contains(&format!("Cannot access memory at address {place:#x}")),
                "gdb did not read {place:#x}; it said: {said}"
            ),
        }
    }
    ballast.walk()?;
    field.check(1)
}

/// As scanners of memory do, which do not know what is the engine's.
fn peeked_whole(ctx: &Ctx) -> Outcome {
    let (field, mut ballast) = ctx.evicted()?;
    let buffer = sys::map(1 << 20)?;
    for _ in 0..3 {
        for mapping in sys::mappings(|line| line.contains(" rw"))? {
            for piece in mapping.pieces(buffer.len) {
                let local = libc::iovec { iov_base: buffer.as_ptr(), iov_len: piece.len };
                let there = libc::iovec { iov_base: piece.as_ptr(), iov_len: piece.len };
                // Some cannot be read, which is not our affair.
                // SAFETY: the local vector is ours, the kernel checks the other.
                unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &there, 1, 0) };
            }
        }
        ballast.walk()?;
        field.check(1)?;
    }
    Ok(())
}

/// The other side of [`look_at`].
fn peek(ctx: &Ctx) -> Outcome {
    let number = |index: usize| -> Result<usize, Stop> {
        ctx.args.get(index).and_then(|word| word.parse().ok()).ok_or(Stop::Wrong("peek takes numbers".into()))
    };
    let pid = number(0)? as libc::pid_t;
    let (remote, generation) = (Span::new(number(1)?, number(2)?), number(3)? as u16);
    let how = ctx.args.get(4).map_or("vm", String::as_str);
    let threads = match how {
        "trace" => attach_all(pid)?,
        "stopped" => {
            // SAFETY: has no conditions.
            sys::ret("kill", unsafe { libc::kill(pid, libc::SIGSTOP) })?;
            Vec::new()
        }
        _ => Vec::new(),
    };
    let found = look(pid, remote, generation, how);
    for thread in threads {
        // SAFETY: we attached to it.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, thread, 0, 0) };
    }
    if how == "stopped" {
        // SAFETY: has no conditions.
        sys::ret("kill", unsafe { libc::kill(pid, libc::SIGCONT) })?;
    }
    found
}

fn look(pid: libc::pid_t, remote: Span, generation: u16, how: &str) -> Outcome {
    use std::os::unix::fs::FileExt;
    let buffer = sys::map(256 << 10)?;
    let memory = std::fs::OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    // A tracer's reads are slow; sixteen pages tell enough.
    let step = if how == "trace" { (remote.len / 16 / PAGE * PAGE).max(buffer.len) } else { buffer.len };
    for piece in remote.pieces(step).map(|piece| piece.part(0, buffer.len)) {
        let local = libc::iovec { iov_base: buffer.as_ptr(), iov_len: buffer.len };
        let there = libc::iovec { iov_base: piece.as_ptr(), iov_len: piece.len };
        match how {
            // Where a page is out the kernel refuses this way in, and the next; it must not make up data.
            "mem" => {
                let mut bytes = vec![0; PAGE];
                for page in piece.pieces(PAGE) {
                    match memory.read_exact_at(&mut bytes, page.start as u64) {
                        Err(error) if error.raw_os_error() == Some(libc::EIO) => continue,
                        read => read?,
                    }
                    ensure!(
                        bytes == bytes_of(page.start, PAGE, generation),
                        "/proc/PID/mem has other bytes in the page at {:#x}",
                        page.start
                    );
                }
                continue;
            }
            "trace" => {
                // SAFETY: the tracee is stopped; the kernel checks the address.
                let word = unsafe { libc::ptrace(libc::PTRACE_PEEKDATA, pid, piece.start, 0) };
                ensure!(
                    word as u64 == super::span::pattern(piece.start, generation)
                        || (word == -1 && sys::errno() == libc::EIO),
                    "the tracer read {word:#x} at {:#x}",
                    piece.start
                );
                continue;
            }
            "write" => {
                buffer.fill_as(piece.start, generation);
                // SAFETY: the local vector is ours, the kernel checks the other.
                let n = unsafe { libc::process_vm_writev(pid, &local, 1, &there, 1, 0) };
                sys::whole("process_vm_writev", n, piece.len)?;
            }
            _ => {}
        }
        // SAFETY: the local vector is ours, the kernel checks the other.
        let n = unsafe { libc::process_vm_readv(pid, &local, 1, &there, 1, 0) };
        sys::whole("process_vm_readv", n, piece.len)?;
        buffer.check_as(piece.start, generation)?;
    }
    Ok(())
}

/// Attaches to every thread, as a debugger does, and waits until each has stopped.
fn attach_all(pid: libc::pid_t) -> Result<Vec<libc::pid_t>, Stop> {
    let mut threads = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let name = entry?.file_name();
        let Some(thread) = name.to_str().and_then(|name| name.parse::<libc::pid_t>().ok()) else { continue };
        // SAFETY: has no conditions for us; the thread stops.
        unsafe {
            if libc::ptrace(libc::PTRACE_ATTACH, thread, 0, 0) == -1 {
                return Err(Stop::Wrong(format!("attach: {}", std::io::Error::last_os_error())));
            }
            let mut status = 0;
            sys::ret("waitpid", libc::waitpid(thread, &mut status, libc::__WALL))?;
        }
        threads.push(thread);
    }
    Ok(threads)
}
