//! `pageout man`: one page. Options come from the table that help comes from; the rest is said here.

use std::io::{self, Write};

use anyhow::Result;
use clap::{Command, CommandFactory};
use clap_mangen::roff::{bold, roman, Inline, Roff};
use clap_mangen::Man;
use pageout::stats::MEANINGS;

use crate::options::Options;

/// Sections in plain words: a heading, then paragraphs.
const SECTIONS: [(&str, &[&str]); 12] = [
    (
        "WHAT IS LIMITED",
        &[
            "The program and all its descendants together keep at most the memory they are given resident; what does not fit \
             of their anonymous memory goes to the swap devices and comes back when it is touched. Below 80 % of the limit \
             they run as if pageout were not there.",
            "While memory is short each process has a share, which follows where pages come back; who is idle gives to \
             who needs it, down to a quarter of an equal share. A process of less than 16 MiB, or an eighth of the limit (less what is shared on purpose) \
             if that is less, or, of many, half of an equal share (2 MiB at least), is let alone.",
            "What counts: all resident memory of a process as /proc/PID/status shows it (VmRSS), the engine's own included; \
             of the other processes their own memory, without files, and with their part of what is shared, since a fork or on purpose. What can go: private, writable, anonymous memory, whoever made it: heaps, mappings; and of mapped files, programs \
             and libraries among them, what is not in use, where the file is on a disk, is owned by the program's user or may be written by him, and no other process has \
             mapped that part. What cannot \
             go: other files, shared memory (files in tmpfs too), what was written to a private mapping of a file, locked memory, code that was made at run time and cannot be written, thread stacks, pages that a device \
             has pinned. A limit below what cannot go is reported with how much that is of all processes together (unmanaged_bytes of --stats is each one's), and gives \
             way: what can go keeps an eighth of the limit beside memory that is shared on purpose, and at most 16 MiB of that beside other memory.",
            "The limit may be overshot for a moment: by the larger of 5 % and 64 MiB while one thread touches new memory \
             as fast as it can, of 5 % and 128 MiB while as many threads as there are CPUs do; before Linux 6.18 for some tenths of a second by as much again, or \
             twice that, where two dozen programs begin in the same instant and take huge pages unasked (since then they are not \
             given to programs beside others that have hardly any room left). What was worse is in resident_peak_bytes.",
            "Sizes are numbers with K, M, G, T or P, powers of 1024 (KiB, MiB and so on too); KB, MB and so on are powers of 1000. \
             The least limit is 16 MiB. A process that runs outside the limit, because the agent cannot be preloaded \
             into it (static, setuid, cleared environment) or has no engine there, is said once it has run for a second, once for each program, and \
             its memory counts from then on, as what cannot go; or it is killed with --strict, unless it has become a user whose processes pageout may not kill. With --memory max nothing is limited, counted or swapped. What another \
             pageout run started below keeps that one's limit.",
        ],
    ),
    (
        "SWAP DEVICES",
        &[
            "PATH is a block device, an existing file, or a new one; it has no comma. Disks may be named by UUID=, LABEL=, \
             PARTUUID= or PARTLABEL=, as swapon(8) takes them. A file must have mode 0600, belong to the user or root, and \
             lie in a directory that only its owner can write. An existing file \
             must be empty, or hold nothing that was written (holes, or room by fallocate(1)), or have a header by mkswap(8), which stays as it is; a block device must have one. Files are emptied at the \
             end, unless processes live on that read from them (PROCESSES). Where run itself is killed, one that was there, and had no header, holds what was swapped, and is \
             refused until it is removed or has one. A new file is made with mode 0600 and a header, so that who is started again after a kill takes it (it stays then), and removed at the end. Where others can write \
             leave out --swap, for a file without a name. mem is memory that counts for nobody's limit \
             but the control group's.",
            "size= is the most that is used; without it a file grows up to what its file system has free, less a \
             reserve (the larger of 1 GiB and 5 %, at most half), 4 TiB at most, by 64 MiB, and mem to what the limit leaves of the memory that there \
             is; one that has a header does not grow, one that is not empty only with it. pri= works as in swapon(8): higher is used first, equal ones in \
             rotation, devices without it after the others in the order of their naming. discard gives freed room \
             back when the program rests, by 2 MiB, which mem and files that had none before do anyhow; rotational keeps to \
             ascending order for a disk that turns and reads ahead by place. Room is lent to processes by a 256th of a device, 2 to 64 MiB. A device has at least 64 MiB, and at most 64 TiB.",
            "A device that is full stops nothing: what is used gives up its place there to what is not; what finds none stays, beyond the \
             limit, and a line says so. Data that cannot be read \
             back raises SIGBUS where it is touched, never zeros.",
        ],
    ),
    (
        "PROCESSES",
        &[
            "The program's environment has LD_PRELOAD, which is appended to, and PAGEOUT_RUN, the run's socket. In ps(1) a run has pageout, \
             witness (which tells whom a signal was for; two where the program has a process group of its own) and a keeper, also called pageout, for each process. Children, threads, vfork, posix_spawn, system and exec work. A fork's child reads what its parent had out where it is, and has an engine of its own.",
            "pageout ends with the program and with its exit status. While other processes that the program left behind \
             live on, pageout stays to serve them, with the program's status at the end; SIGTERM, SIGINT, SIGHUP or \
             SIGQUIT ends the wait, and they go on with the memory and the room that they have, which stays as it is in files and disks; what they \
             execute later has no limit. \
             Where SIGTERM came while the program lived, whenever that was, or another of them ended it, there is no wait of more than two seconds: who \
             stops the program by pageout waits for pageout. What it inherited but standard error is \
             closed, and its directory is /, as soon as the program runs. It serves a quarter as many processes at a time as it may have open files \
             (ulimit -Hn); others wait until one has ended. Of more than 2048 each one more may have all of the limit for itself, and a line says so.",
            "Signals that are sent to pageout go on to the program, but for those that stop: SIGTSTP, SIGTTIN and SIGTTOU stop \
             pageout alone, and the program waits as soon as it needs it. Those of the terminal (Ctrl-C, Ctrl-Z) reach both, and so does what \
             a process sends to the group of both (kill -- -PGID) or to all of a control group: it does not go on. A program that has a process group of its own (timeout, setsid) gets what pageout's \
             gets, and Ctrl-C, by pageout; Ctrl-Z stops pageout alone, and a program of another session outlives the terminal. What the program, or a process below it, sends to pageout is for the parent that the \
             program would have without, and goes to pageout's own. Who waits for pageout is not \
             told that a program stops which has a group of its own (suspend in a shell). One \
             that was ignored when pageout started, as SIGHUP by nohup(1), does not end the wait.",
            "If the engine of a process ends while memory is out, the process is killed with SIGKILL and one line says \
             so: it would read zeros otherwise.",
        ],
    ),
    (
        "RUNNING TREES",
        &[
            "pageout ps, show and stat look at trees that run already, swapon and swapoff change them: those of the same user, by their sockets in the \
             runtime directory (FILES). A tree is named with --run by the process number of its pageout or of any of its \
             processes, or by the name of its program. Without --run ps and show list all trees; the others take \
             the only one.",
            "ps: PID and NAME of each process, its RESIDENT memory and LIMIT, what it has on swap devices (SWAPPED; of pages that are in memory as well, too), the FAULTS that \
             were answered, and the STATE of its engine: watching (far from the limit, nothing can go yet), swapping, \
             ending, or unlimited. RUN is the process number of pageout. Figures are those of the engine's last look, at \
             most a second ago.",
            "show: the swap devices, in the columns of swapon --show, or with --summary in the format of \
             /proc/swaps. A column RUN comes last where several trees are shown. TYPE is partition, file or memory.",
            "stat: the number of processes, their resident memory (of what several have, each its part), what of it cannot go (unmanaged), and what is on swap devices; then by the second: bytes \
             that came in (si) and went out (so), faults, of these the ones that needed a device (major) and the ones \
             that found the page on its way out (rescued), pages that came back (refaults), faults that had to make \
             room themselves (stalls). The first line is about the time since the start, each later one about the time \
             since the line before. It counts on while processes come and go, and ends with the tree.",
            "swapon: another device for all processes of the tree, by the rules of --swap (SWAP DEVICES). It is opened by \
             the tree's pageout, with its rights. What a process has of other devices by then is used up first. A tree \
             has at most 8 devices.",
            "swapoff: NAME is as show says it; of a file or disk it may be the SPEC that swapon took, too. What processes have there comes home, and what does not fit below the limit \
             goes to the other devices; USED of show says how much is left. It is refused when there is no room for it. When \
             the room is taken by others meanwhile it waits until there is some, or a swapon brings some. What \
             children of a fork read from their parent's swap stays until they have ended or executed another program, and \
             swapoff waits for them. pageout swapoff \
             returns when the device is closed; interrupted (Ctrl-C) it leaves the device on, and what came home stays \
             there.",
        ],
    ),
    (
        "HAZARDS",
        &[
            "Core dumps hold no memory that was swapped out: it reads as zeros there. /proc/PID/mem and ptrace(2), so \
             gdb(1), get EIO for it; process_vm_readv(2) brings it in.",
            "Memory lent to the kernel without a pin may show other data to its reader when it is swapped out \
             meanwhile: vmsplice(2) is made a copy and SO_ZEROCOPY is refused for this reason; io_uring's SEND_ZC and \
             direct I/O on network file systems are not noticed.",
            "A child that a program forks by an instruction of its own, past libc, ends with SIGSEGV at once when memory \
             nears the limit, and a line says so: it would read zeros. Only beside another thread's fork(2) code \
             that is of no file, was written to, or is of a file that has changed since, is not noticed.",
            "A process that becomes another user and then executes a program cannot reach the agent any more: that \
             program runs outside the limit, and a line says so. With --any-user, in root's runs, it is limited like the others. \
             Its user, all of whose processes can come to its descriptors, can then read and change what the whole tree has in swap, root's \
             programs too: for trees whose users trust each other, as a container's. A process that becomes another user \
             and forks without executing a program first is as before: all its memory comes home for that.",
            "A run is one domain of trust: its processes share one swap, and the engine of each has the rights that the process began \
             with, on the same memory. Hostile code in a process that has given up rights by itself (setuid(2), seccomp(2)) can \
             take them back: put the sandbox around pageout run.",
            "Memory is shared with the engine's process: unshare(CLONE_VM) and setns(2) into a time namespace fail, as in a \
             program of several threads. SIGKILL of pageout run leaves the processes with the room that they have, and without new room; what \
             they execute later has no limit, and a swap file that pageout made stays, with what was the program's memory \
             in it: remove it.",
        ],
    ),
    (
        "STATISTICS",
        &[
            "--stats writes one JSON object: the totals (COUNTERS), and an array processes with the same names for each process. \
             resident_peak_bytes of the totals is \
             the most of all processes together, without files, or of the largest, with them. What is so at a moment \
             (resident_bytes, shared_bytes, unmanaged_bytes, swapped_pages, out_pages) each process says as it was at its last look (out_pages and unmanaged_bytes at its last count, each 0.3 s), and the totals have \
             the largest of these. processes_unlisted counts processes that are only in the totals. \
             swap_lost_bytes, of the totals alone, is room on the devices that had not come back when all processes had ended: 0, or \
             a bug of pageout's.",
        ],
    ),
    (
        "JSON",
        &[
            "ps --json: an array of trees. Each has run, the process number of its pageout; main and program, number and name \
             of the program; uptime_seconds; limit_bytes; devices, as show has them; processes, each with name, state and \
             its counters (COUNTERS; of one without a limit four of them, and 2^64-1 as its limit); and ended, the totals of the processes that have ended.",
            "show --json: an array of devices: name, type, size_bytes, used_bytes, priority, leaving (on its way off), run.",
            "stat --json: one object a line: uptime_seconds of the tree and interval_seconds that the line is about; procs, \
             resident_bytes, unmanaged_bytes (of these, what cannot go) and swapped_bytes as they are; by the second si_bytes, so_bytes, faults, major, rescued, \
             refaults and stalls, which come from pswpin, pswpout, pgfault, pgmajfault, rescued, workingset_refault_anon and \
             allocstall.",
        ],
    ),
    (
        "EXIT STATUS",
        &[
            "That of the program; if a signal N ended it, pageout ends by that signal, without a core, which a shell shows as \
             128+N; 125 if pageout failed, 126 if the program cannot be \
             executed, 127 if it was not found. Statistics that cannot be written at the end are an error's line, and change no status; a place where they could not be is refused \
             before anything is run, with 125. pageout doctor exits with 0 if pageout run would work, else with 1; bench as \
             pageout-bench does (0, 1, 2), or with 125 where that is not installed; the other verbs, and doctor where an option is wrong, with 0, or with 125 and one line that \
             says why not.",
        ],
    ),
    (
        "ENVIRONMENT",
        &[
            "PAGEOUT_MEMORY, PAGEOUT_SWAP (several with ; between them), PAGEOUT_SWAPIN, PAGEOUT_MAX_ORDER, \
             PAGEOUT_STRICT (yes or no, or true, on, 1 and their like), PAGEOUT_ANY_USER (the same), PAGEOUT_STATS, PAGEOUT_CONFIG: as the options. An option beats the environment, which beats \
             a file.",
            "TMPDIR: where the default swap file is made. PAGEOUT_AGENT_DIR: where the agent is unpacked; it must not \
             be mounted noexec. PAGEOUT_AGENT: another agent, for those who work on it. XDG_RUNTIME_DIR, \
             XDG_CACHE_HOME, XDG_CONFIG_HOME: as usual.",
        ],
    ),
    (
        "FILES",
        &[
            "/etc/pageout.conf and ~/.config/pageout.conf: lines like memory = 512M; names are memory, swap (may be \
             repeated), swapin, max-order, strict (yes or no), any-user (the same) and stats. A line that begins with # is a comment.",
            "$XDG_RUNTIME_DIR/pageout or /tmp/pageout-UID: sockets of runs; one that somebody removes is made again, and a line says so. ~/.cache/pageout: the agent, or beside the sockets where no \
             home can be written, or others can change what it lies in; the sockets neither lie where others can. With --any-user both are in \
             /run/pageout, or in $XDG_RUNTIME_DIR/pageout-any where others can enter that.",
        ],
    ),
    (
        "REQUIREMENTS",
        &[
            "Linux 6.8 or later on x86-64 and the GNU libc 2.34 or later, with read and write access to /dev/userfaultfd, or vm.unprivileged_userfaultfd=1, or \
             CAP_SYS_PTRACE. pageout doctor says what is lacking.",
        ],
    ),
    ("SEE ALSO", &["swapon(8), mkswap(8), userfaultfd(2), proc_vmstat(5), cgroups(7), ld.so(8)"]),
];

/// Writes the page.
pub fn write(to: &mut dyn Write) -> Result<()> {
    let mut command = Options::command();
    command.build();
    let man = Man::new(command.clone());
    man.render_title(to)?;
    man.render_name_section(to)?;
    synopsis(to, &command)?;
    man.render_description_section(to)?;
    for verb in command.get_subcommands() {
        // The bench says itself what it takes.
        if !["bench", "man", "help"].contains(&verb.get_name()) {
            section(to, &format!("OPTIONS OF {}", verb.get_name().to_uppercase()), |page| {
                options(page, verb)
            })?;
        }
    }
    for (heading, paragraphs) in SECTIONS {
        section(to, heading, |page| {
            for paragraph in paragraphs {
                page.control("PP", []);
                page.text([roman(*paragraph)]);
            }
        })?;
        if heading == "STATISTICS" {
            section(to, "COUNTERS", counters)?;
        }
    }
    Ok(())
}

/// What each counter counts, by the words of the table that they come from.
fn counters(page: &mut Roff) {
    page.control("PP", []);
    page.text([roman(
        "The names are those of /proc/vmstat where the thing is the same. Names that end in _bytes are bytes, others pages of \
         4 KiB or events, since the start of the process.",
    )]);
    for (name, meaning) in MEANINGS {
        page.control("TP", []);
        page.text([bold(*name)]);
        page.text([roman(meaning.trim().replace('`', ""))]);
    }
}

fn section(to: &mut dyn Write, heading: &str, fill: impl FnOnce(&mut Roff)) -> io::Result<()> {
    let mut page = Roff::new();
    page.control("SH", [heading]);
    fill(&mut page);
    page.to_writer(to)
}

fn synopsis(to: &mut dyn Write, command: &Command) -> io::Result<()> {
    section(to, "SYNOPSIS", |page| {
        for verb in command.get_subcommands() {
            let rest = match verb.get_name() {
                "run" => " [OPTIONS] [--] COMMAND [ARG...]",
                "ps" | "show" | "doctor" => " [OPTIONS]",
                "stat" => " [OPTIONS] [DELAY [COUNT]]",
                "swapon" => " SPEC [--run ID]",
                "swapoff" => " NAME [--run ID]",
                "bench" => " ARG...",
                "completions" => " SHELL",
                _ => "",
            };
            page.text([bold(format!("pageout {}", verb.get_name())), roman(rest)]);
            page.control("br", []);
        }
    })
}

fn options(page: &mut Roff, command: &Command) {
    for option in command.get_arguments().filter(|argument| argument.get_id() != "help") {
        let mut line: Vec<Inline> = Vec::new();
        if let Some(short) = option.get_short() {
            line.extend([bold(format!("-{short}")), roman(", ")]);
        }
        let names = option.get_value_names().unwrap_or_default().join(" ");
        match option.get_long() {
            Some(long) => line.push(bold(format!("--{long}"))),
            None => line.push(bold(names.as_str())),
        }
        if !option.is_positional() && option.get_action().takes_values() {
            line.push(roman(format!(" {names}")));
        }
        page.control("TP", []);
        page.text(line);
        page.text([roman(option.get_help().map(ToString::to_string).unwrap_or_default())]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_every_option_and_the_slack() {
        let mut page = Vec::new();
        write(&mut page).unwrap();
        let page = String::from_utf8(page).unwrap().replace("\\-", "-");
        for word in
            ["--memory", "--swap", "--swapin", "--max-order", "--strict", "--stats", "--config", "--dry-run"]
        {
            assert!(page.contains(word), "{word}");
        }
        for word in
            ["64 MiB", "128 MiB", "vmsplice", "Core dumps", "fork", "DELAY", "busy_left", "swpout_fallback"]
        {
            assert!(page.contains(word), "{word}");
        }
    }
}
