//! `pageout doctor`: what this kernel and user may do, in words, with the line that mends each lack.
//!
//! Looks and changes nothing, except that it makes the directories that a run would, and unpacks the agent there.

use std::fmt::Display;
use std::fs;
use std::path::Path;

use anyhow::Result;
use pageout::api::{reason, Bytes, Spec};
use pageout::kernel::{HugePages, NEEDED};
use pageout::wire::DEVICES;
use pageout_uffd::Uffd;

use crate::agent;
use crate::config::Config;
use crate::device::{self, Device};
use crate::kernel;
use crate::memory;
use crate::options::SettingOptions;
use crate::report::Target;
use crate::run::LEAST_OPEN_FILES;
use crate::say;
use crate::serve::{self, OPEN_FILES_EACH, OWN_OPEN_FILES};
use crate::sys;

/// The findings so far.
#[derive(Debug, Default)]
struct Findings {
    /// Some of them stop a run.
    lacks: u32,
}

impl Findings {
    fn good(&mut self, what: &str, found: impl Display) {
        say::print(format_args!("good   {what:<12} {found}\n"));
    }

    /// A run works, but not as well as it could.
    fn weak(&mut self, what: &str, found: impl Display, remedy: impl Display) {
        say::print(format_args!("weak   {what:<12} {found}\n       {:<12} {remedy}\n", ""));
    }

    /// A run does not work.
    fn lack(&mut self, what: &str, found: impl Display, remedy: impl Display) {
        self.lacks += 1;
        say::print(format_args!("LACKS  {what:<12} {found}\n       {:<12} {remedy}\n", ""));
    }

    /// The same by an error: its last part says what to do, if it has several.
    fn lack_by(&mut self, what: &str, error: &anyhow::Error, remedy: &str) {
        let text = format!("{error:#}");
        let text = text.strip_prefix(&format!("{what}: ")).unwrap_or(&text);
        let (found, remedy) = text.rsplit_once("; ").unwrap_or((text, remedy));
        self.lack(what, found, remedy);
    }
}

/// Prints all findings; 0 if a run with these settings would work, else 1.
pub fn doctor(options: &SettingOptions) -> Result<i32> {
    let (config, unseen) = Config::look(options)?;
    let mut findings = Findings::default();
    if let Err(error) = kernel::check_proc() {
        findings.lack_by("/proc", &error, "");
    }
    userfaultfd(&mut findings);
    let reach = config.reach();
    if let Err(error) = kernel::device_for_all(reach) {
        findings.lack_by("other users", &error, "");
    }
    huge_pages(&mut findings);
    io_uring(&mut findings);
    memory_limits(&mut findings, &config, unseen.as_ref());
    resource_limits(&mut findings);
    swap(&mut findings, &config);
    match serve::probe_socket(reach) {
        Ok(directory) => findings.good("socket", format_args!("in {}", directory.display())),
        Err(error) => findings.lack_by("socket", &error, ""),
    }
    if let Some(Err(error)) = config.stats.as_deref().map(Target::check) {
        findings.lack_by("statistics", &error, "");
    }
    match agent::ready(reach, false) {
        Ok(path) => findings.good("agent", format_args!("unpacked as {}", path.display())),
        Err(error) => findings.lack_by("agent", &error, ""),
    }
    match findings.lacks {
        0 => say::print("pageout run works here\n"),
        1 => say::print("pageout run does not work here: one thing is lacking\n"),
        lacks => say::print(format_args!("pageout run does not work here: {lacks} things are lacking\n")),
    }
    Ok(i32::from(findings.lacks > 0))
}

fn userfaultfd(findings: &mut Findings) {
    let release = sys::kernel_release();
    let device = Path::new("/dev/userfaultfd");
    match Uffd::supported() {
        Ok(offered) => {
            let missing = NEEDED.difference(offered);
            match missing.is_empty() {
                true => findings.good("kernel", format_args!("Linux {release} has all that is needed")),
                false => {
                    let found = format_args!("Linux {release}: userfaultfd lacks {missing}").to_string();
                    findings.lack("kernel", found, "use Linux 6.8 or later")
                }
            }
            let way = match (Uffd::open_device(), device.exists()) {
                (Ok(_), _) => "through /dev/userfaultfd",
                (Err(_), true) => "through userfaultfd(2); /dev/userfaultfd is not for this user",
                (Err(_), false) => "through userfaultfd(2); there is no /dev/userfaultfd",
            };
            findings.good("userfaultfd", way);
        }
        Err(error) => {
            let sysctl = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
            findings.good("kernel", format_args!("Linux {release}; what it has is not to be seen"));
            let remedy = match (device.exists(), sysctl.trim()) {
                (true, "0") => {
                    "as root: setfacl -m u:USER:rw /dev/userfaultfd (this user alone), or sysctl \
                     vm.unprivileged_userfaultfd=1 (everybody)"
                }
                (false, "0") => {
                    "in a container: --device /dev/userfaultfd; before Linux 6.1, as root: sysctl \
                     vm.unprivileged_userfaultfd=1"
                }
                (true, _) => "a seccomp filter or the kernel refuses it; as root: setfacl -m u:USER:rw /dev/userfaultfd",
                (false, _) => "in a container: --device /dev/userfaultfd; else use a kernel with CONFIG_USERFAULTFD=y",
            };
            let error = error.to_string();
            // What it advises itself is the first of these ways.
            let found = error.split_once("; ").map_or(error.as_str(), |(found, _)| found);
            findings.lack("userfaultfd", found.strip_prefix("userfaultfd: ").unwrap_or(found), remedy);
        }
    }
}

fn huge_pages(findings: &mut Findings) {
    let what = "huge pages";
    if !Path::new("/sys/kernel").exists() {
        return findings.weak(what, "not to be seen, so not used", "mount -t sysfs sysfs /sys");
    }
    let place = Path::new("/sys/kernel/mm/transparent_hugepage");
    let mode = match HugePages::now() {
        HugePages::Always => "always",
        HugePages::Asked => "madvise",
        HugePages::Never if !place.exists() => {
            return findings.weak(what, "not in this kernel", "use one with CONFIG_TRANSPARENT_HUGEPAGE=y");
        }
        HugePages::Never => {
            // Each size has a word of its own, which may be to do as is said of all.
            let said = fs::read_to_string(place.join("hugepages-2048kB/enabled")).unwrap_or_default();
            let (word, file) = match said.contains("[never]") {
                true => ("inherit", "hugepages-2048kB/enabled"),
                false => ("madvise", "enabled"),
            };
            let remedy = format!("as root: echo {word} > {}", place.join(file).display());
            return findings.weak(what, "never: all swapping is in small pieces", remedy);
        }
    };
    findings.good(what, format!("{mode}: large memory goes and comes in pieces of 2M"))
}

fn io_uring(findings: &mut Findings) {
    let what = "io_uring";
    match sys::probe_io_uring() {
        Ok(()) => findings.good(what, "may be used"),
        Err(error) => {
            let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
            let remedy = match disabled.trim() {
                "" | "0" => "in a container: allow io_uring in the seccomp profile",
                _ => "as root: sysctl kernel.io_uring_disabled=0",
            };
            findings.weak(what, format_args!("{}; pread and pwrite are used", reason(&error)), remedy);
        }
    }
}

fn memory_limits(findings: &mut Findings, config: &Config, unseen: Option<&anyhow::Error>) {
    let total = Bytes(memory::total_bytes());
    let available = Bytes(memory::available_bytes());
    let remedy = "mount all of /proc: mount -t proc proc /proc";
    match unseen {
        Some(error) => {
            let error = error.to_string();
            let (found, instead) = error.rsplit_once("; ").unwrap_or((&error, ""));
            return findings.lack("limit", found, format_args!("{remedy}; or {instead}"));
        }
        None if total.0 == u64::MAX => findings.weak("memory", "the machine's is not to be seen", remedy),
        None => match memory::cgroup_limit() {
            Some(limit) => {
                findings.good("memory", format_args!("{total}, and {} for this control group", Bytes(limit)))
            }
            None => findings.good("memory", format_args!("{total}, no limit of a control group")),
        },
    }
    match config.limit_bytes {
        u64::MAX => findings.weak("limit", "max: nothing is ever swapped", "give a size: --memory 50%"),
        limit if limit > available.0 => findings.weak(
            "limit",
            format_args!("{} is more than there is, {available}", Bytes(limit)),
            "give less: --memory 80%",
        ),
        limit => findings.good("limit", format_args!("{} for all processes of a run", Bytes(limit))),
    }
}

fn resource_limits(findings: &mut Findings) {
    let (_, files) = sys::limit_of(libc::RLIMIT_NOFILE);
    let enough = files.saturating_sub(OWN_OPEN_FILES as u64) / OPEN_FILES_EACH as u64;
    let found = format!("at most {files}: enough for some {enough} processes");
    match files {
        files if files < LEAST_OPEN_FILES => {
            findings.lack("open files", format_args!("at most {files}"), "ulimit -Hn 65536")
        }
        files if files < 1024 => findings.weak("open files", found, "ulimit -Hn 65536"),
        _ => findings.good("open files", format_args!("at most {files}")),
    }
    let (size, _) = sys::limit_of(libc::RLIMIT_FSIZE);
    if size < device::LEAST.0 {
        findings.lack("file size", format_args!("at most {}", Bytes(size)), "ulimit -f unlimited");
    } else if size != libc::RLIM_INFINITY {
        findings.weak("file size", format_args!("at most {}", Bytes(size)), "ulimit -f unlimited");
    }
    let (space, _) = sys::limit_of(libc::RLIMIT_AS);
    if space != libc::RLIM_INFINITY {
        findings.weak(
            "addresses",
            format_args!("at most {}: the engine takes some of the program's", Bytes(space)),
            "ulimit -v unlimited",
        );
    }
}

fn swap(findings: &mut Findings, config: &Config) {
    let unnamed = [Spec::unnamed()];
    let specs = if config.swap.is_empty() { &unnamed } else { config.swap.as_slice() };
    if specs.len() > DEVICES {
        findings.lack(
            "swap",
            format_args!("{} devices", specs.len()),
            format_args!("name at most {DEVICES}"),
        );
    }
    for (index, spec) in specs.iter().enumerate() {
        match Device::plan(spec, config.limit_bytes, &specs[..index]) {
            Ok((name, size)) => findings.good("swap", format_args!("{name}, up to {size}")),
            Err(error) => findings.lack_by("swap", &error, "name another with --swap"),
        }
    }
}
