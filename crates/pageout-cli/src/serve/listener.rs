//! Where a run's processes, and who looks at it, connect: a socket named by run's process number.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, Result};
use pageout::api::reason;

use crate::directory::{self, Reach};
use crate::sys::{self, PidFd};
use crate::tree;

/// The socket and its name, which goes when it goes.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) socket: OwnedFd,
    pub(super) path: PathBuf,
    reach: Reach,
    /// Device and inode of the name.
    identity: Option<(u64, u64)>,
}

impl Listener {
    fn at(path: PathBuf, reach: Reach) -> io::Result<Self> {
        let socket = sys::listen_at(&path)?;
        let identity = identity(&path);
        let listener = Self { socket, path, reach, identity };
        if reach == Reach::Any {
            // Whoever connects is looked at: see `accept`.
            fs::set_permissions(&listener.path, Permissions::from_mode(0o666))?;
        }
        Ok(listener)
    }

    /// Is the name gone, with the directory maybe (who tidies `/tmp`, the last logout), or another's?
    pub(super) fn is_nameless(&self) -> bool {
        identity(&self.path) != self.identity
    }

    /// The same name once more. Who waits for the old one's answer is reset, and tries again.
    pub(super) fn again(&mut self) -> Result<()> {
        let directory = directory::ready_runtime(self.reach)?;
        if self.path.parent() != Some(directory.as_path()) {
            bail!("now it would be in {}", directory.display());
        }
        let _turn = sys::lock(&directory).ok();
        // What it was is dropped, and has no name to remove.
        *self = Self::at(self.path.clone(), self.reach).map_err(|error| anyhow!("{}", reason(&error)))?;
        Ok(())
    }
}

/// A file's device and inode.
fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|about| (about.dev(), about.ino()))
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Not one that came in its place.
        if identity(&self.path) == self.identity {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Is who connected of the tree? Its number may be another's if it has ended.
pub(super) fn is_below_us(socket: BorrowedFd<'_>, peer: i32) -> bool {
    let me = std::process::id() as i32;
    tree::descends_from(peer, me) && PidFd::of_peer(socket).is_ok_and(|peer| !peer.has_ended())
}

/// Whether a run could listen, and in which directory.
pub fn probe_socket(reach: Reach) -> Result<PathBuf> {
    listen(reach).map(|listener| listener.path.parent().expect("a file in a directory").to_owned())
}

/// A socket named by our process number in the runtime directory; sweeps out those of runs that were killed. One at a
/// time: a socket that is bound and does not listen yet refuses as one does that was left behind.
pub(super) fn listen(reach: Reach) -> Result<Listener> {
    let directory = directory::ready_runtime(reach)?;
    let _turn = sys::lock(&directory).ok();
    for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_socket = path.extension().is_some_and(|extension| extension == "sock");
        let refused = |e: io::Error| e.kind() == io::ErrorKind::ConnectionRefused;
        if is_socket && sys::connect_to(&path).is_err_and(refused) {
            let _ = fs::remove_file(&path);
        }
    }
    let pid = std::process::id();
    // Another container with the same directory may have the same process number.
    let names = std::iter::once(format!("{pid}.sock")).chain((1..10).map(|n| format!("{pid}-{n}.sock")));
    let mut last = None;
    for path in names.map(|name| directory.join(name)) {
        match Listener::at(path.clone(), reach) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = Some((path, error)),
        }
    }
    let (path, error) = last.expect("there is a name");
    let why = reason(&error);
    Err(anyhow!("{}: cannot listen: {why}; set XDG_RUNTIME_DIR to a short path of your own", path.display()))
}
