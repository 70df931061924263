//! A memory cgroup with a limit, of version 1 or 2, whichever has the memory controller.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};

use crate::janitor::{Made, Scope};
use crate::units::Bytes;

/// Which kind of cgroup the system has its memory controller in, and where a new one goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hierarchy {
    /// The parent directory in the memory hierarchy.
    V1(PathBuf),
    /// The parent directory in the unified hierarchy.
    V2(PathBuf),
}

impl Hierarchy {
    /// Finds it on this system.
    pub fn find() -> Result<Hierarchy> {
        let mounts = fs::read_to_string("/proc/self/mounts").context("/proc/self/mounts")?;
        let own = fs::read_to_string("/proc/self/cgroup").context("/proc/self/cgroup")?;
        Self::from(&mounts, &own).context("no memory cgroup is mounted; mount cgroup2 on /sys/fs/cgroup")
    }

    /// From the texts of `/proc/self/mounts` and `/proc/self/cgroup`.
    fn from(mounts: &str, own: &str) -> Option<Hierarchy> {
        let mounted = |kind: &str, option: &str| {
            mounts.lines().find_map(|line| {
                let mut fields = line.split(' ').skip(1);
                let (at, its_kind, options) = (fields.next()?, fields.next()?, fields.next()?);
                let has = option.is_empty() || options.split(',').any(|o| o == option);
                (its_kind == kind && has).then(|| PathBuf::from(at))
            })
        };
        if let Some(root) = mounted("cgroup", "memory") {
            // Within a container the own path may lie outside of what is mounted: then the root is meant.
            let own = own.lines().find_map(|line| {
                let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
                controllers.split(',').any(|c| c == "memory").then_some(path)
            });
            let inside = root.join(own.unwrap_or("/").trim_start_matches('/'));
            return Some(Hierarchy::V1(if inside.is_dir() { inside } else { root }));
        }
        // Processes may not sit beside a controlled group in version 2, except in the root.
        mounted("cgroup2", "").map(Hierarchy::V2)
    }
}

/// A cgroup made for one run; the janitor removes it.
pub struct Cgroup {
    dir: PathBuf,
    hierarchy: Hierarchy,
}

impl Cgroup {
    /// Makes one with `limit` on memory, not on swap, that swaps anonymous memory readily.
    pub fn new(scope: &Scope, limit: Bytes) -> Result<Cgroup> {
        let hierarchy = Hierarchy::find()?;
        let (Hierarchy::V1(parent) | Hierarchy::V2(parent)) = &hierarchy;
        let dir = parent.join(format!("pageout-bench.{}", std::process::id()));
        scope.made(Made::Cgroup(dir.clone()))?;
        let bytes = limit.0.to_string();
        match &hierarchy {
            Hierarchy::V1(_) => {
                make(&dir)?;
                set(&dir.join("memory.limit_in_bytes"), &bytes)?;
                set(&dir.join("memory.swappiness"), "100")?;
            }
            Hierarchy::V2(parent) => {
                let control = parent.join("cgroup.subtree_control");
                let enabled = fs::read_to_string(&control).with_context(|| control.display().to_string())?;
                if !enabled.split_whitespace().any(|c| c == "memory") {
                    // Undone after the group is gone: told before the group in turn.
                    scope.made(Made::Setting(control.clone(), "-memory".into()))?;
                    scope.gone(Made::Cgroup(dir.clone()))?;
                    scope.made(Made::Cgroup(dir.clone()))?;
                    set(&control, "+memory")?;
                }
                make(&dir)?;
                set(&dir.join("memory.max"), &bytes)?;
                // Version 2 has one swappiness for the whole system: 100 for the time of the run.
                let swappiness = Path::new("/proc/sys/vm/swappiness");
                let old = fs::read_to_string(swappiness).context("/proc/sys/vm/swappiness")?;
                scope.made(Made::Setting(swappiness.into(), old))?;
                set(swappiness, "100")?;
            }
        }
        Ok(Cgroup { dir, hierarchy })
    }

    /// Its directory: a process enters by writing 0 to `cgroup.procs` there.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// How often the kernel killed a process in it for want of memory.
    pub fn oom_kills(&self) -> u64 {
        let file = match self.hierarchy {
            Hierarchy::V1(_) => "memory.oom_control",
            Hierarchy::V2(_) => "memory.events",
        };
        let text = fs::read_to_string(self.dir.join(file)).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
    }

    /// The most that was charged to it, in bytes.
    pub fn peak(&self) -> Option<f64> {
        let file = match self.hierarchy {
            Hierarchy::V1(_) => "memory.max_usage_in_bytes",
            Hierarchy::V2(_) => "memory.peak",
        };
        fs::read_to_string(self.dir.join(file)).ok()?.trim().parse().ok()
    }
}

fn make(dir: &Path) -> Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            bail!("{}: permission denied; run as root, or leave out the kernel engines", dir.display())
        }
        result => result.with_context(|| format!("making the cgroup {}", dir.display())),
    }
}

fn set(file: &Path, value: &str) -> Result<()> {
    fs::write(file, value).with_context(|| format!("writing {value} to {}", file.display()))
}

/// The processes in the cgroup `dir`; none when it is gone.
pub fn members(dir: &Path) -> Vec<i32> {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_either_version() {
        let v1 =
            "cgroup /no/such/memory cgroup rw,relatime,memory 0 0\ncgroup2 /no/such/unified cgroup2 rw 0 0\n";
        assert_eq!(
            Hierarchy::from(v1, "4:memory:/a/b\n0::/\n"),
            Some(Hierarchy::V1("/no/such/memory".into()))
        );
        let v2 = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        assert_eq!(Hierarchy::from(v2, "0::/user.slice\n"), Some(Hierarchy::V2("/sys/fs/cgroup".into())));
        assert_eq!(Hierarchy::from("proc /proc proc rw 0 0\n", ""), None);
    }
}
