//! The agent: the library that is preloaded. It is part of this program's file and is unpacked once, under its hash,
//! into a directory of the user's alone, or one that others may read (`--any-user`).

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail, Result};
use pageout::api::reason;

use crate::directory::{self, Reach};
use crate::program;
use crate::say;
use crate::sys;

/// The library.
const BYTES: &[u8] = include_bytes!(env!("PAGEOUT_AGENT_FILE"));
/// Its name, which changes whenever it does: a running program keeps the one that it has mapped.
const NAME: &str = concat!("libpageout_agent-", env!("PAGEOUT_AGENT_HASH"), ".so");
/// How every version's begins.
const STEM: &str = "libpageout_agent";

/// Where it may be unpacked, best first, and whether the user chose.
fn candidates(reach: Reach) -> (Vec<PathBuf>, bool) {
    match std::env::var_os("PAGEOUT_AGENT_DIR").filter(|dir| !dir.is_empty()) {
        Some(dir) => (vec![dir.into()], true),
        None => {
            let cache = directory::cache().filter(|_| reach == Reach::Own);
            (cache.into_iter().chain([directory::runtime(reach)]).collect(), false)
        }
    }
}

/// Where the agent is or, with `dry`, would be; unpacks it if it is not there. `PAGEOUT_AGENT` names another one,
/// for those who work on it.
pub fn ready(reach: Reach, dry: bool) -> Result<PathBuf> {
    check_libc(&sys::libc_version())?;
    let agent = find(reach, dry)?;
    match directory::shut(&agent).filter(|_| reach == Reach::Any && !dry) {
        None => Ok(agent),
        Some(shut) => bail!(
            "agent: {}: {} keeps other users from it (--any-user); open that to them, or set PAGEOUT_AGENT_DIR to a directory \
             of your own that they can enter",
            agent.display(),
            shut.display()
        ),
    }
}

/// Refuses a libc that has some of what the agent calls in other libraries (dlsym, the keys of threads): the loader would end each
/// program. Ours is the programs' as well.
fn check_libc(version: &str) -> Result<()> {
    const LEAST: (u32, u32) = (2, 34);
    let mut numbers = version.split('.').map_while(|number| number.parse().ok());
    match numbers.next().zip(numbers.next()) {
        Some(found) if found < LEAST => {
            bail!("agent: the GNU libc {version} is too old; use 2.34 or later")
        }
        _ => Ok(()),
    }
}

fn find(reach: Reach, dry: bool) -> Result<PathBuf> {
    if let Some(agent) = std::env::var_os("PAGEOUT_AGENT").filter(|agent| !agent.is_empty()) {
        let named = PathBuf::from(agent);
        let agent = fs::canonicalize(&named)
            .map_err(|e| anyhow!("PAGEOUT_AGENT {}: {}; unset it", named.display(), reason(&e)))?;
        if !loadable(&agent) {
            bail!("PAGEOUT_AGENT {}: {UNLOADABLE}", agent.display());
        }
        // The loader would go on without it.
        let named = agent.display();
        let is_library = agent.is_file().then(|| File::open(&agent)).transpose();
        match is_library.and_then(|file| file.map_or(Ok(false), |file| program::is_library(&file))) {
            Ok(true) => {}
            Err(e) if e.kind() != ErrorKind::UnexpectedEof => {
                bail!("PAGEOUT_AGENT {named}: {}", reason(&e))
            }
            _ => bail!("PAGEOUT_AGENT {named}: no library of this machine; unset it"),
        }
        return Ok(agent);
    }
    let (directories, chosen) = candidates(reach);
    let mut first = None;
    for directory in directories {
        let checked = if chosen { directory::check_chosen(&directory, reach) } else { Ok(()) };
        let unpacked = checked.and_then(|()| match dry {
            true => named_well(&directory).map(|()| directory.join(NAME)),
            false => unpack(&directory, reach, BYTES, NAME),
        });
        // What it lies in was made meanwhile, maybe by somebody else.
        let is_still_one = || candidates(reach).0.contains(&directory);
        let unpacked = unpacked.and_then(|path| match is_still_one() {
            true => Ok(path),
            false => bail!("{}: others can change what it lies in", directory.display()),
        });
        match unpacked {
            Ok(path) => return Ok(path),
            Err(error) => {
                say::debug(format_args!("{error:#}"));
                first.get_or_insert(error);
            }
        }
    }
    let remedy = match chosen {
        true => "set PAGEOUT_AGENT_DIR to another directory",
        false => "set PAGEOUT_AGENT_DIR to a directory of your own where programs may run",
    };
    let error = first.expect("there is a candidate");
    bail!("agent: {error:#}; {remedy}")
}

const UNLOADABLE: &str = "LD_PRELOAD cannot hold a path with spaces or colons";

/// Whether LD_PRELOAD can hold this path.
fn loadable(path: &Path) -> bool {
    !path.as_os_str().as_bytes().iter().any(|byte| b": \t\n".contains(byte))
}

/// Writes `bytes` as `name` into `directory`, unless they are there, and checks that they can be run from there.
fn unpack(directory: &Path, reach: Reach, bytes: &[u8], name: &str) -> Result<PathBuf> {
    let shown = directory.display();
    named_well(directory)?;
    directory::ensure(directory, reach)?;
    let path = directory.join(name);
    let file = match File::open(&path) {
        Ok(file) if holds(&file, reach, bytes).unwrap_or(false) => file,
        _ => write(directory, reach, &path, bytes).map_err(|e| anyhow!("{shown}: {}", reason(&e)))?,
    };
    sys::probe_executable(&file).map_err(|error| match error.raw_os_error() {
        Some(libc::EPERM) => anyhow!("{shown}: on a file system mounted noexec"),
        _ => anyhow!("{shown}: {}", reason(&error)),
    })?;
    Ok(path)
}

/// Can the loader be told of a library in it?
fn named_well(directory: &Path) -> Result<()> {
    let shown = directory.display();
    if !directory.is_absolute() {
        bail!("{shown}: not an absolute path");
    }
    if !loadable(directory) {
        bail!("{shown}: {UNLOADABLE}");
    }
    Ok(())
}

/// Is this all that is in it, for those who are to read it? A piece at a time: at each start of a program, and new memory
/// costs more than to read.
fn holds(mut file: &File, reach: Reach, bytes: &[u8]) -> std::io::Result<bool> {
    let about = file.metadata()?;
    if about.len() != bytes.len() as u64 || about.mode() & reach.mode() != reach.mode() {
        return Ok(false);
    }
    let mut found = [0; 16 << 10];
    for piece in bytes.chunks(found.len()) {
        let found = &mut found[..piece.len()];
        file.read_exact(found)?;
        if found != piece {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes beside and renames, so that nobody ever loads a part of it.
fn write(directory: &Path, reach: Reach, path: &Path, bytes: &[u8]) -> std::io::Result<File> {
    // Another container with the same directory may have the same process number.
    let beside = directory.join(format!(".agent-{}-{}", std::process::id(), sys::since_boot()));
    let mut options = OpenOptions::new();
    let mut file = options.read(true).write(true).create_new(true).mode(0o700).open(&beside)?;
    let written = file.write_all(bytes);
    // Whatever the umask takes away.
    let written = written.and_then(|()| file.set_permissions(Permissions::from_mode(reach.mode())));
    let written = written.and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written?;
    // Opened again for reading: a file open for writing cannot be mapped to run on every file system.
    drop(file);
    File::open(path)
}

/// LD_PRELOAD with `agent` behind what it names already: who comes first wins, and an allocator must stay first.
pub fn preload(before: Option<OsString>, agent: &Path) -> OsString {
    let before = before.unwrap_or_default();
    // Compared as the bytes that they are: other spellings of a path are other names to the loader.
    let ours = agent.as_os_str().as_bytes();
    // Another version's, or another directory's, of a run that this one is in: two in a process would each manage the
    // other's memory, and wait for it for ever.
    let is_another = |name: &[u8]| {
        let start = name.rsplit(|byte| *byte == b'/').next().unwrap_or(name);
        name != ours && start.starts_with(STEM.as_bytes())
    };
    let names = before.as_bytes().split(|byte| b": ".contains(byte)).filter(|name| !name.is_empty());
    let mut list: Vec<&[u8]> = names.filter(|name| !is_another(name)).collect();
    if !list.contains(&ours) {
        list.push(ours);
    }
    OsString::from_vec(list.join(&b':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_libc_is_refused_with_the_reason() {
        for version in ["2.34", "2.36", "2.40.9000", "3.0", "unknown"] {
            assert!(check_libc(version).is_ok(), "{version}");
        }
        for version in ["2.31", "2.9", "2.33.1", "1.99"] {
            let line = format!("agent: the GNU libc {version} is too old; use 2.34 or later");
            assert_eq!(check_libc(version).unwrap_err().to_string(), line);
        }
        assert!(check_libc(&sys::libc_version()).is_ok());
    }

    #[test]
    fn preload_is_appended_to() {
        let agent = Path::new("/c/a.so");
        assert_eq!(preload(None, agent), "/c/a.so");
        assert_eq!(preload(Some("".into()), agent), "/c/a.so");
        assert_eq!(preload(Some("/j.so /k.so".into()), agent), "/j.so:/k.so:/c/a.so");
        let another = Some("/d/libpageout_agent-1a.so:/j.so /e/libpageout_agent.so".into());
        assert_eq!(preload(another, agent), "/j.so:/c/a.so");
        let ours = Path::new("/c/libpageout_agent-2b.so");
        let again = "/c/libpageout_agent-2b.so:/j.so";
        assert_eq!(preload(Some(again.into()), ours), again);
        assert_eq!(preload(Some("/c/a.so:/j.so".into()), agent), "/c/a.so:/j.so");
    }

    #[test]
    fn unpacks_once_and_mends_what_is_wrong() {
        let home = std::env::temp_dir().join(format!("pageout-agent-{}", std::process::id()));
        let directory = home.join("a/b");
        let path = unpack(&directory, Reach::Own, b"agent", "x.so").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"agent");
        assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);
        let made = fs::metadata(&path).unwrap().modified().unwrap();
        unpack(&directory, Reach::Own, b"agent", "x.so").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), made);
        fs::write(&path, b"agen").unwrap();
        unpack(&directory, Reach::Own, b"agent", "x.so").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"agent");
        fs::set_permissions(&directory, PermissionsExt::from_mode(0o755)).unwrap();
        let error = unpack(&directory, Reach::Own, b"agent", "x.so").unwrap_err().to_string();
        assert!(error.ends_with(&format!("run chmod 700 {}", directory.display())), "{error}");
        fs::remove_dir_all(&home).unwrap();
    }
}
