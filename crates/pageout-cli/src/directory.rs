//! Directories of the user's own: made with mode 0700, and trusted only if nobody else owns or can enter them.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, Context, Result};

use crate::sys;

/// Where sockets are: `$XDG_RUNTIME_DIR/pageout`, or `/tmp/pageout-UID`.
pub fn runtime() -> PathBuf {
    match sys::directory_from("XDG_RUNTIME_DIR").filter(|dir| dir.is_dir() && is_out_of_reach(dir)) {
        Some(dir) => dir.join("pageout"),
        None => PathBuf::from(format!("/tmp/pageout-{}", sys::euid())),
    }
}

/// Where sockets of the user's runs may be, the likeliest first: some are begun by who has no `XDG_RUNTIME_DIR` (cron,
/// sudo) and looked at by who has the usual one, or the other way round.
pub fn runtimes() -> Vec<PathBuf> {
    let likeliest = runtime();
    let user = sys::euid();
    let usual = [format!("/run/user/{user}/pageout"), format!("/tmp/pageout-{user}")].map(PathBuf::from);
    let is_usual = usual.contains(&likeliest);
    let others =
        usual.into_iter().filter(|other| is_usual && *other != likeliest && check_private(other).is_ok());
    std::iter::once(likeliest.clone()).chain(others).collect()
}

/// [`runtime`], made if it is not there: what is wrong with it, and what to do, if it is of no use.
pub fn ready_runtime() -> Result<PathBuf> {
    let path = runtime();
    let shown = path.display();
    let remedy = "set XDG_RUNTIME_DIR to a directory of your own";
    // What is there says by itself what to do.
    ensure_private(&path).map_err(|e| if path.exists() { e } else { anyhow!("{e}; {remedy}") })?;
    sys::may_access(&path, libc::W_OK).map_err(|e| anyhow!("{shown}: {}; {remedy}", sys::reason(&e)))?;
    Ok(path)
}

/// Where what can be made again is kept: `$XDG_CACHE_HOME/pageout`, or `~/.cache/pageout`. A home that is not there
/// (`/nonexistent`) is not to be made.
pub fn cache() -> Option<PathBuf> {
    let home = || sys::directory_from("HOME").filter(|home| home.is_dir());
    let base = sys::directory_from("XDG_CACHE_HOME").or_else(|| home().map(|home| home.join(".cache")))?;
    is_out_of_reach(&base).then(|| base.join("pageout"))
}

/// Can no other user put something else in the place of a directory? That is to be asked of root's, who may have another's HOME
/// (`su -m`): who owns what a user's home lies in has that user in his hands anyway.
fn is_out_of_reach(directory: &Path) -> bool {
    if sys::euid() != 0 {
        return true;
    }
    let is_safe = |directory: &Path| {
        // What is not there yet is made by us.
        let Ok(about) = fs::metadata(directory) else { return true };
        let is_open = about.mode() & 0o1002 == 0o002;
        is_trusted(about.uid()) && !is_open
    };
    let real = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    real.ancestors().all(is_safe)
}

/// May what belongs to this user decide for us? That is us, root, and who root is called in a user namespace that has none.
pub fn is_trusted(user: u32) -> bool {
    user == 0 || user == sys::euid() || fs::metadata("/").is_ok_and(|root| root.uid() == user)
}

/// Makes `path`, and what it lies in, if it is not there, and checks that it is the user's alone.
pub fn ensure_private(path: &Path) -> Result<()> {
    let shown = path.display();
    if let Some(parent) = path.parent().filter(|parent| !parent.exists()) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.map_err(|e| anyhow!("{}: cannot be made: {}", parent.display(), sys::reason(&e)))?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            bail!("{shown}: cannot be made: {}", sys::reason(&error))
        }
        _ => {}
    }
    check_private(path)
}

/// Checks that a directory is the user's alone.
pub fn check_private(path: &Path) -> Result<()> {
    match flaw(path)? {
        Some((cause, remedy)) => bail!("{}: {cause}; {remedy}", path.display()),
        None => Ok(()),
    }
}

/// The same of one that the user chose, if it is there: it may hold what is not ours to shut or to remove.
pub fn check_chosen(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path).is_ok().then(|| flaw(path)).transpose()?.flatten() {
        Some((cause, _)) => bail!("{}: {cause}", path.display()),
        None => Ok(()),
    }
}

/// What is wrong with a directory, and what to do if it is ours.
fn flaw(path: &Path) -> Result<Option<(String, String)>> {
    let shown = path.display();
    // A link that somebody put there is no directory of ours.
    let about = fs::symlink_metadata(path).with_context(|| shown.to_string())?;
    if !about.is_dir() {
        return Ok(Some(("is not a directory".into(), "remove it".into())));
    }
    if about.uid() != sys::euid() {
        let remedy = "remove it, or set XDG_RUNTIME_DIR to a directory of your own";
        return Ok(Some(("belongs to another user".into(), remedy.into())));
    }
    let mode = about.mode() & 0o7777;
    let open = (mode & 0o077 != 0)
        .then(|| (format!("others can enter it (mode {mode:04o})"), format!("run chmod 700 {shown}")));
    Ok(open)
}
