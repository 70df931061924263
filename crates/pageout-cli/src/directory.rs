//! Directories of the user's own: made with mode 0700, and trusted only if nobody else owns or can enter them; and that of
//! runs that serve other users' processes, which others can enter, but not change.

use std::fs::{self, DirBuilder, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, Context, Result};
use pageout::api::reason;

use crate::sys;

/// Whose processes have to come to something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// The user's.
    Own,
    /// Anybody's.
    Any,
}

impl Reach {
    /// The permissions of what is made for them.
    pub fn mode(self) -> u32 {
        match self {
            Self::Own => 0o700,
            Self::Any => 0o755,
        }
    }
}

/// Where sockets are: `$XDG_RUNTIME_DIR/pageout`, or `/tmp/pageout-UID`; for any user's processes `$XDG_RUNTIME_DIR/pageout-any`
/// where others can enter that, or `/run/pageout`.
pub fn runtime(reach: Reach) -> PathBuf {
    let named = sys::directory_from("XDG_RUNTIME_DIR").filter(|dir| dir.is_dir() && is_out_of_reach(dir));
    match reach {
        Reach::Own => match named {
            Some(dir) => dir.join("pageout"),
            None => PathBuf::from(format!("/tmp/pageout-{}", sys::euid())),
        },
        Reach::Any => match named.filter(|dir| shut(dir).is_none()) {
            Some(dir) => dir.join("pageout-any"),
            None => PathBuf::from("/run/pageout"),
        },
    }
}

/// Where sockets of the user's runs may be, the likeliest first: some are begun by who has no `XDG_RUNTIME_DIR` (cron,
/// sudo) and looked at by who has the usual one, or the other way round.
pub fn runtimes() -> Vec<(PathBuf, Reach)> {
    let likeliest = (runtime(Reach::Own), Reach::Own);
    let user = sys::euid();
    let usual = [format!("/run/user/{user}/pageout"), format!("/tmp/pageout-{user}")].map(PathBuf::from);
    let is_usual = usual.contains(&likeliest.0);
    let others = usual.into_iter().filter(|other| is_usual && *other != likeliest.0);
    let others = others.map(|other| (other, Reach::Own));
    let any = (user == 0).then(|| (runtime(Reach::Any), Reach::Any));
    let others = others.chain(any).filter(|(other, reach)| check(other, *reach).is_ok());
    std::iter::once(likeliest.clone()).chain(others).collect()
}

/// [`runtime`], made if it is not there: what is wrong with it, and what to do, if it is of no use.
pub fn ready_runtime(reach: Reach) -> Result<PathBuf> {
    let path = runtime(reach);
    let shown = path.display();
    let remedy = match reach {
        Reach::Own => "set XDG_RUNTIME_DIR to a directory of your own",
        Reach::Any => "set XDG_RUNTIME_DIR to a directory of your own that others can enter",
    };
    // What is there says by itself what to do.
    ensure(&path, reach).map_err(|e| if path.exists() { e } else { anyhow!("{e}; {remedy}") })?;
    sys::may_access(&path, libc::W_OK).map_err(|e| anyhow!("{shown}: {}; {remedy}", reason(&e)))?;
    Ok(path)
}

/// Where what can be made again is kept: `$XDG_CACHE_HOME/pageout`, or `~/.cache/pageout`. A home that is not there
/// (`/nonexistent`) is not to be made.
pub fn cache() -> Option<PathBuf> {
    let home = || sys::directory_from("HOME").filter(|home| home.is_dir());
    let base = sys::directory_from("XDG_CACHE_HOME").or_else(|| home().map(|home| home.join(".cache")))?;
    is_out_of_reach(&base).then(|| base.join("pageout"))
}

/// Can no other user put something else in the place of a directory? Root may have another's HOME (`su -m`), and a service one
/// that all can write, or that somebody else has made there.
fn is_out_of_reach(directory: &Path) -> bool {
    let is_safe = |about: &fs::Metadata| {
        // The group of a user's own is the user's affair, and often has no other member; that of root's has some on purpose.
        let is_own = about.uid() == sys::euid() && about.uid() != 0;
        let others = if is_own || about.gid() == 0 { 0o002 } else { 0o022 };
        let is_open = about.mode() & 0o1000 == 0 && about.mode() & others != 0;
        is_trusted(about.uid()) && !is_open
    };
    // A link may be another's as well.
    let is_ours = |at: &Path| fs::symlink_metadata(at).is_ok_and(|about| is_trusted(about.uid()));
    all_above(directory).into_iter().all(|(at, about)| is_safe(&about) && is_ours(&at))
}

/// A file or directory and all that it lies in, by this path and the real one, without what is not there yet: that is made by us.
fn all_above(path: &Path) -> Vec<(PathBuf, fs::Metadata)> {
    let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let all = real.ancestors().chain(path.ancestors());
    all.filter_map(|at| Some((at.to_owned(), fs::metadata(at).ok()?))).collect()
}

/// May what belongs to this user decide for us? That is us, root, and who root is called in a user namespace that has none.
pub fn is_trusted(user: u32) -> bool {
    user == 0 || user == sys::euid() || fs::metadata("/").is_ok_and(|root| root.uid() == user)
}

/// What keeps other users from coming to a file or directory, if anything does: that, or one in which it lies.
pub fn shut(path: &Path) -> Option<PathBuf> {
    let is_shut = |about: &fs::Metadata| about.mode() & if about.is_dir() { 0o001 } else { 0o004 } == 0;
    all_above(path).into_iter().find(|(_, about)| is_shut(about)).map(|(at, _)| at)
}

/// Makes `path`, and what it lies in, if it is not there, and checks that it is the user's alone, to enter or to change.
pub fn ensure(path: &Path, reach: Reach) -> Result<()> {
    let shown = path.display();
    if let Some(parent) = path.parent().filter(|parent| !parent.exists()) {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
        made.map_err(|e| anyhow!("{}: cannot be made: {}", parent.display(), reason(&e)))?;
    }
    match DirBuilder::new().mode(reach.mode()).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            bail!("{shown}: cannot be made: {}", reason(&error))
        }
        Err(_) => {}
        // Whatever the umask takes away.
        Ok(()) => fs::set_permissions(path, Permissions::from_mode(reach.mode()))
            .map_err(|error| anyhow!("{shown}: {}", reason(&error)))?,
    }
    check(path, reach)
}

/// Checks that a directory is the user's alone, to enter or to change.
pub fn check(path: &Path, reach: Reach) -> Result<()> {
    match flaw(path, reach)? {
        Some((cause, remedy)) => bail!("{}: {cause}; {remedy}", path.display()),
        None => Ok(()),
    }
}

/// The same of one that the user chose, if it is there: it may hold what is not ours to shut or to remove.
pub fn check_chosen(path: &Path, reach: Reach) -> Result<()> {
    match fs::symlink_metadata(path).is_ok().then(|| flaw(path, reach)).transpose()?.flatten() {
        Some((cause, _)) => bail!("{}: {cause}", path.display()),
        None => Ok(()),
    }
}

/// What is wrong with a directory, and what to do if it is ours.
fn flaw(path: &Path, reach: Reach) -> Result<Option<(String, String)>> {
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
    let cause = match reach {
        Reach::Own if mode & 0o077 != 0 => "others can enter it",
        Reach::Any if mode & 0o022 != 0 => "others can change it",
        Reach::Any if mode & 0o055 != 0o055 => "others cannot enter it",
        _ => return Ok(None),
    };
    Ok(Some((format!("{cause} (mode {mode:04o})"), format!("run chmod {:o} {shown}", reach.mode()))))
}
