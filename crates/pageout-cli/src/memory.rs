//! How much memory there is for us: the machine's, or less where a control group says so. Reads /proc and /sys.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::sys;

/// Memory of the machine in bytes. Read once.
pub fn total_bytes() -> u64 {
    static TOTAL: OnceLock<u64> = OnceLock::new();
    *TOTAL.get_or_init(read_total_bytes)
}

fn read_total_bytes() -> u64 {
    fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_total(&text)).unwrap_or(u64::MAX)
}

fn meminfo_total(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Processes that the kernel has killed for want of memory, of the control group that we were in at first, or of the machine, where
/// we were in none. Of another, which we may have been moved to, nobody knows how many there were before.
#[derive(Debug)]
pub struct OomKills {
    path: PathBuf,
    before: u64,
}

impl OomKills {
    /// Counts from here on. `None`: nobody counts them.
    pub fn watch() -> Option<Self> {
        let groups = own_groups().into_iter();
        let counts = groups.map(|(group, mount, version)| mount.join(group).join(version.kills()));
        let mut counts = counts.chain([PathBuf::from("/proc/vmstat")]);
        counts.find_map(|path| Some(Self { before: Self::count(&path)?, path }))
    }

    /// Are there more by now?
    pub fn are_more(&self) -> bool {
        Self::count(&self.path).is_some_and(|count| count > self.before)
    }

    fn count(path: &Path) -> Option<u64> {
        let text = sys::text_of(path)?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.trim().parse().ok()
    }
}

/// The two kinds of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    /// The file with a group's limit.
    fn limit(self) -> &'static str {
        match self {
            Self::One => "memory.limit_in_bytes",
            Self::Two => "memory.max",
        }
    }

    /// The file that says how many the kernel has killed in it.
    fn kills(self) -> &'static str {
        match self {
            Self::One => "memory.oom_control",
            Self::Two => "memory.events",
        }
    }
}

/// The lowest limit now of the control groups that this process is in, in bytes; `None` where none is set.
pub fn cgroup_limit() -> Option<u64> {
    let machine = total_bytes();
    own_groups()
        .into_iter()
        .flat_map(|(group, mount, version)| limits_up_from(&mount.join(group), &mount, version.limit()))
        .min()
        // Version 1 writes "no limit" as a number that no machine has: of this size, if the machine's is not known.
        .filter(|limit| *limit < machine.min(1 << 62))
}

/// The smaller of the machine's memory and the control group's limit, in bytes.
pub fn available_bytes() -> u64 {
    total_bytes().min(cgroup_limit().unwrap_or(u64::MAX))
}

/// A control group for memory: relative to its mount, the mount, and of which kind.
type Group = (PathBuf, PathBuf, Version);

/// Those that this process is in.
fn own_groups() -> Vec<Group> {
    let [groups, mounts] = ["cgroup", "mountinfo"].map(|name| sys::text_of(format!("/proc/self/{name}")));
    hierarchies(&groups.unwrap_or_default(), &mounts.unwrap_or_default())
}

fn hierarchies(groups: &str, mounts: &str) -> Vec<Group> {
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let (fs_type, option, version) = if controllers.is_empty() {
            ("cgroup2", None, Version::Two)
        } else if controllers.split(',').any(|c| c == "memory") {
            ("cgroup", Some("memory"), Version::One)
        } else {
            continue;
        };
        if let Some((root, mount)) = mounts.lines().find_map(|line| mount_of(line, fs_type, option)) {
            // In a container the mount shows a part of the tree: what lies above is not to be seen from here.
            let group = Path::new(group);
            let below = group.strip_prefix(&root).unwrap_or(Path::new(""));
            found.push((below.strip_prefix("/").unwrap_or(below).to_owned(), mount, version));
        }
    }
    found
}

/// Root and mount point of a line of mountinfo, if it is of this type and has this super block option.
fn mount_of(line: &str, fs_type: &str, option: Option<&str>) -> Option<(PathBuf, PathBuf)> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let mut right = right.split(' ');
    let matches = right.next() == Some(fs_type)
        && option.is_none_or(|option| right.nth(1).is_some_and(|all| all.split(',').any(|o| o == option)));
    matches.then(|| Some((PathBuf::from(left.next()?), PathBuf::from(left.next()?))))?
}

/// The limits of a group and of those that it lies in.
fn limits_up_from(group: &Path, mount: &Path, file: &str) -> Vec<u64> {
    let groups = group.ancestors().take_while(|dir| dir.starts_with(mount));
    groups.filter_map(|dir| fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_groups_of_both_versions() {
        let groups = "9:name=systemd:/\n4:cpu,memory:/docker/abc/run\n0::/user.slice/x\n";
        let mounts = "30 23 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                      31 23 0:27 /docker/abc /sys/fs/cgroup/memory rw shared:1 - cgroup cgroup rw,memory\n";
        assert_eq!(
            hierarchies(groups, mounts),
            [
                ("run".into(), "/sys/fs/cgroup/memory".into(), Version::One),
                ("user.slice/x".into(), "/sys/fs/cgroup/unified".into(), Version::Two),
            ]
        );
    }

    #[test]
    fn takes_the_lowest_limit_on_the_way_up() {
        let mount = std::env::temp_dir().join(format!("pageout-memory-{}", std::process::id()));
        fs::create_dir_all(mount.join("a/b")).unwrap();
        fs::write(mount.join("a/b/memory.max"), "max\n").unwrap();
        fs::write(mount.join("a/memory.max"), "4096\n").unwrap();
        let limits = limits_up_from(&mount.join("a/b"), &mount, "memory.max");
        fs::remove_dir_all(&mount).unwrap();
        assert_eq!(limits, [4096]);
    }

    #[test]
    fn reads_meminfo() {
        assert_eq!(meminfo_total("MemTotal:       2048 kB\nMemFree: 1 kB\n"), Some(2048 << 10));
    }
}
