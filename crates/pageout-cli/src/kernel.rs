//! What the kernel must have.

use std::io;
use std::os::fd::OwnedFd;

use anyhow::{anyhow, bail, Result};
use pageout::api::reason;
use pageout::kernel::NEEDED;
use pageout_uffd::{Features, Uffd};

use crate::directory::Reach;
use crate::sys;

/// Refuses a kernel that lacks something, or does not let this user have it.
pub fn check() -> Result<()> {
    match Uffd::supported() {
        Ok(offered) => judge(offered, &sys::kernel_release()),
        Err(error) => Err(anyhow!("{error}, or run \"pageout doctor\"")),
    }
}

/// `/dev/userfaultfd`, for processes of users who may not open it themselves; none is needed for one's own.
pub fn device_for_all(reach: Reach) -> Result<Option<OwnedFd>> {
    if reach == Reach::Own {
        return Ok(None);
    }
    Uffd::open_device().map(Some).map_err(|errno| {
        let why = reason(&io::Error::from(errno));
        anyhow!("--any-user: /dev/userfaultfd: {why}; in a container pass --device /dev/userfaultfd")
    })
}

/// Refuses a /proc in which processes have other numbers than here.
pub fn check_proc() -> Result<()> {
    match std::fs::read_link("/proc/self") {
        Err(_) => bail!("/proc: not mounted; mount it: mount -t proc proc /proc"),
        Ok(own) if own.to_str() != Some(std::process::id().to_string().as_str()) => {
            bail!("/proc: of another PID namespace; mount this one's: mount -t proc proc /proc")
        }
        Ok(_) => Ok(()),
    }
}

fn judge(offered: Features, release: &str) -> Result<()> {
    let missing = NEEDED.difference(offered);
    if !missing.is_empty() {
        bail!("Linux {release} is too old: userfaultfd lacks {missing}; use Linux 6.8 or later");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_kernel_is_refused_with_the_reason() {
        assert!(judge(NEEDED, "6.8.0").is_ok());
        let error = judge(NEEDED.difference(Features::MOVE), "6.6.1").unwrap_err().to_string();
        assert_eq!(error, "Linux 6.6.1 is too old: userfaultfd lacks MOVE; use Linux 6.8 or later");
    }
}
