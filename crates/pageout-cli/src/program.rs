//! The program to run: where it is, and whether a library can be preloaded into it. Reads files, runs nothing.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use pageout::api::reason;

use crate::sys;

/// Exit status for a program that is there but cannot be run.
pub const NOT_EXECUTABLE: i32 = 126;
/// Exit status for a program that is not there.
pub const NOT_FOUND: i32 = 127;
/// Exit status for our own failures.
pub const FAILED: i32 = 125;

/// Bytes of an ELF file's header, and its types of what can be run.
const HEADER: usize = 64;
const ET_EXEC: u16 = 2;
const ET_DYN: u16 = 3;

/// Why a program is not run.
#[derive(Debug)]
pub struct Refused {
    /// Our exit status.
    pub status: i32,
    line: String,
}

impl Refused {
    /// With an exit status and a line for the user.
    pub fn new(status: i32, line: String) -> Self {
        Self { status, line }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

impl std::error::Error for Refused {}

/// Why a library cannot be preloaded into a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// No interpreter: nothing loads libraries.
    Static,
    /// Its interpreter is musl's.
    Libc,
    /// Another class or machine than ours.
    Foreign,
    /// Gains another user or group: the loader ignores preloading.
    SetId,
    /// Gains capabilities: the same.
    Capabilities,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Static => "statically linked",
            Self::Libc => "linked with another libc than GNU's",
            Self::Foreign => "for another machine than this 64-bit one",
            Self::SetId => "setuid or setgid",
            Self::Capabilities => "with file capabilities",
        })
    }
}

impl Obstacle {
    fn remedy(self) -> &'static str {
        match self {
            Self::Static => "use a dynamically linked build",
            Self::Libc => "use a build for glibc",
            Self::Foreign => "use a 64-bit build for this machine",
            Self::SetId => "run a copy without these bits, or run it as its owner",
            Self::Capabilities => "run a copy without them",
        }
    }
}

/// Finds `name` as `execvp` would and checks that it can be preloaded.
pub fn resolve(name: &OsStr) -> Result<PathBuf, Refused> {
    let shown = Path::new(name).display();
    let path = find(name)?;
    match obstacle(&path) {
        Ok(None) => Ok(path),
        Ok(Some((file, obstacle))) => {
            let which =
                if file == path { format!("{shown}") } else { format!("{shown}: {}", file.display()) };
            let line = format!("{which}: {obstacle}, so pageout cannot be preloaded; {}", obstacle.remedy());
            Err(Refused::new(FAILED, line))
        }
        // What cannot be read may still be run, and then nobody can tell what it is.
        Err(error) => {
            let (status, line) = match error.kind() {
                ErrorKind::NotFound => (
                    NOT_FOUND,
                    "its interpreter was not found; check its first line, or its loader (file(1))".into(),
                ),
                ErrorKind::UnexpectedEof => (NOT_EXECUTABLE, "is cut short; name a whole program".into()),
                ErrorKind::InvalidData | ErrorKind::InvalidInput => {
                    (NOT_EXECUTABLE, "is not a valid program; name another".into())
                }
                _ => {
                    let why = reason(&error);
                    (
                        NOT_EXECUTABLE,
                        format!("cannot be read, so it cannot be checked: {why}; run a readable copy"),
                    )
                }
            };
            Err(Refused::new(status, format!("{shown}: {line}")))
        }
    }
}

fn find(name: &OsStr) -> Result<PathBuf, Refused> {
    let shown = Path::new(name).display();
    let not_found = || Refused::new(NOT_FOUND, format!("{shown}: not found; check its name and PATH"));
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match executable(&path) {
            Ok(()) => Ok(path),
            Err(error) if error.kind() == ErrorKind::NotFound => Err(not_found()),
            Err(error) => Err(not_executable(name, &path, &error)),
        };
    }
    if name.is_empty() {
        return Err(Refused::new(NOT_FOUND, "(empty): not found; name a program".into()));
    }
    let mut refusal = None;
    let search = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    for directory in env::split_paths(&search) {
        // An empty element is the working directory.
        let directory = if directory.as_os_str().is_empty() { Path::new(".").into() } else { directory };
        let path = directory.join(name);
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                refusal.get_or_insert_with(|| not_executable(name, &path, &error));
            }
            Err(_) => {}
        }
    }
    Err(refusal.unwrap_or_else(not_found))
}

fn not_executable(name: &OsStr, path: &Path, error: &std::io::Error) -> Refused {
    let (name, shown) = (Path::new(name).display(), path.display());
    let line = match error.kind() {
        _ if path.is_dir() => format!("{name}: is a directory; name a program"),
        ErrorKind::PermissionDenied if std::fs::metadata(path).is_err() => {
            format!(
                "{name}: the directory of {shown} cannot be entered; name a program that this user may run"
            )
        }
        // Its mode would do.
        ErrorKind::PermissionDenied if is_on_noexec(path) => {
            format!("{name}: on a file system mounted noexec; run a copy on another")
        }
        ErrorKind::PermissionDenied => format!("{name}: not executable; chmod +x {shown} if it is a program"),
        _ => format!("{name}: {}; name a program", reason(error)),
    };
    Refused::new(NOT_EXECUTABLE, line)
}

fn is_on_noexec(path: &Path) -> bool {
    let probed = File::open(path).and_then(|file| {
        let may_run = file.metadata()?.mode() & 0o111 != 0;
        Ok(may_run && sys::probe_executable(&file).is_err_and(|e| e.raw_os_error() == Some(libc::EPERM)))
    });
    probed.unwrap_or(false)
}

fn executable(path: &Path) -> std::io::Result<()> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(ErrorKind::PermissionDenied.into());
    }
    sys::may_access(path, libc::X_OK)
}

/// The file that stands in the way of preloading, if one does: the program, or the interpreter of a script.
pub fn obstacle(path: &Path) -> std::io::Result<Option<(PathBuf, Obstacle)>> {
    /// As many as the kernel follows.
    const INTERPRETERS: usize = 5;
    let mut path = path.to_owned();
    for _ in 0..INTERPRETERS {
        let file = File::open(&path)?;
        let mut head = [0; 256];
        let len = file.read_at(&mut head, 0)?;
        let head = &head[..len];
        if let Some(line) = head.strip_prefix(b"#!") {
            match interpreter(line) {
                Some(next) => path = next,
                None => return Ok(None),
            }
            continue;
        }
        if !head.starts_with(b"\x7fELF") {
            // Not for us to say: exec refuses it, or hands it to the shell.
            return Ok(None);
        }
        let found = gains_privileges(&path, &file)?.or(elf_obstacle(&file, head)?);
        return Ok(found.map(|obstacle| (path, obstacle)));
    }
    Ok(None)
}

/// The interpreter that a `#!` line names.
fn interpreter(line: &[u8]) -> Option<PathBuf> {
    let line = line.split(|byte| *byte == b'\n').next()?;
    let word = line.split(|byte| b" \t".contains(byte)).find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsStr::from_bytes(word)))
}

/// What makes the kernel start a program in secure mode, where LD_PRELOAD is ignored.
fn gains_privileges(path: &Path, file: &File) -> std::io::Result<Option<Obstacle>> {
    if sys::no_new_privs() || sys::file_system(path)?.nosuid {
        return Ok(None);
    }
    let about = file.metadata()?;
    let (uid, gid) = sys::real_ids();
    let setuid = about.mode() & libc::S_ISUID != 0 && about.uid() != uid;
    // Without the group's execute bit setgid means something else.
    let setgid_bits = libc::S_ISGID | libc::S_IXGRP;
    let setgid = about.mode() & setgid_bits == setgid_bits && about.gid() != gid;
    if setuid || setgid {
        return Ok(Some(Obstacle::SetId));
    }
    let capabilities = uid != 0 && sys::has_xattr(path, c"security.capability");
    Ok(capabilities.then_some(Obstacle::Capabilities))
}

/// What an ELF file's headers tell. One that the kernel would refuse is an error: it would be read as a shell's script.
fn elf_obstacle(file: &File, head: &[u8]) -> std::io::Result<Option<Obstacle>> {
    const PT_LOAD: u32 = 1;
    const PT_INTERP: u32 = 3;
    const ENTRY: u16 = 56;
    if head.len() < HEADER {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    // Class, order of bytes, and version, as every machine has them.
    if !matches!(head[4..7], [1 | 2, 1 | 2, 1]) {
        return Err(ErrorKind::InvalidData.into());
    }
    if !is_for_us(head) {
        return Ok(Some(Obstacle::Foreign));
    }
    let is_program = matches!(u16_at(head, 16), Some(ET_EXEC | ET_DYN)) && u16_at(head, 54) == Some(ENTRY);
    if !is_program || segment(file, head, PT_LOAD)?.is_none() {
        return Err(ErrorKind::InvalidData.into());
    }
    let Some((offset, len)) = segment(file, head, PT_INTERP)? else {
        return Ok((!is_loader(file)?).then_some(Obstacle::Static));
    };
    // What loads it must be there, as the interpreter of a script.
    let mut loader = vec![0; len.min(libc::PATH_MAX as u64) as usize];
    file.read_exact_at(&mut loader, offset)?;
    let loader = loader.split(|byte| *byte == 0).next().unwrap_or_default();
    let loader = Path::new(OsStr::from_bytes(loader));
    sys::may_access(loader, libc::F_OK)?;
    let is_musl = loader.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld-musl"));
    Ok(is_musl.then_some(Obstacle::Libc))
}

/// Whether a file is what loads this system's programs. It preloads into the program that it is given; one that is static is
/// told of as any descendant that is.
fn is_loader(file: &File) -> std::io::Result<bool> {
    const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
    let about = file.metadata()?;
    Ok(std::fs::metadata(LOADER)
        .is_ok_and(|loader| (loader.dev(), loader.ino()) == (about.dev(), about.ino())))
}

/// Whether the loader takes a file for a library to preload.
pub fn is_library(file: &File) -> std::io::Result<bool> {
    const PT_DYNAMIC: u32 = 2;
    const DT_FLAGS_1: u64 = 0x6fff_fffb;
    const DF_1_PIE: u64 = 0x0800_0000;
    let mut head = [0; 256];
    let len = file.read_at(&mut head, 0)?;
    let head = &head[..len];
    if !head.starts_with(b"\x7fELF") || !is_for_us(head) || u16_at(head, 16) != Some(ET_DYN) {
        return Ok(false);
    }
    let Some((offset, len)) = segment(file, head, PT_DYNAMIC)? else { return Ok(false) };
    // A program may be of the same type; that it is one stands among its flags.
    let mut dynamic = vec![0; len.min(1 << 16) as usize];
    file.read_exact_at(&mut dynamic, offset)?;
    let is_program = |entry: &[u8]| {
        u64_at(entry, 0) == Some(DT_FLAGS_1) && u64_at(entry, 8).is_some_and(|flags| flags & DF_1_PIE != 0)
    };
    Ok(!dynamic.chunks_exact(16).any(is_program))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).map(|b| u16::from_le_bytes([b[0], b[1]]))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes")))
}

/// Whether an ELF file is for this machine, by a head that is whole.
fn is_for_us(head: &[u8]) -> bool {
    const CLASS_64: u8 = 2;
    const LITTLE_ENDIAN: u8 = 1;
    const X86_64: u16 = 62;
    head.len() >= HEADER && head[4..6] == [CLASS_64, LITTLE_ENDIAN] && u16_at(head, 18) == Some(X86_64)
}

/// Where in an ELF file the first segment of a kind is, and its length there.
fn segment(file: &File, head: &[u8], kind: u32) -> std::io::Result<Option<(u64, u64)>> {
    let (table, size, count) = (u64_at(head, 32), u16_at(head, 54), u16_at(head, 56));
    let (Some(table), Some(size), Some(count)) = (table, size, count) else { return Ok(None) };
    for index in 0..u64::from(count) {
        let mut entry = [0; 40];
        file.read_exact_at(&mut entry, table.saturating_add(index * u64::from(size)))?;
        if entry[..4] == kind.to_le_bytes() {
            return Ok(u64_at(&entry, 8).zip(u64_at(&entry, 32)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn reads_script_lines() {
        let path = |line: &str| interpreter(line.as_bytes());
        assert_eq!(path("/bin/sh\necho"), Some("/bin/sh".into()));
        assert_eq!(path(" \t/usr/bin/env -S x\n"), Some("/usr/bin/env".into()));
        // As the kernel takes it: there is no such file.
        assert_eq!(path("/bin/sh\r\n"), Some("/bin/sh\r".into()));
        assert_eq!(path("\n/bin/sh"), None);
        assert_eq!(path(""), None);
    }

    #[test]
    fn tells_dynamic_from_foreign_programs() {
        let myself = env::current_exe().unwrap();
        assert_eq!(obstacle(&myself).unwrap(), None);
        let path = env::temp_dir().join(format!("pageout-elf-{}", std::process::id()));
        let mut bytes = fs::read(&myself).unwrap()[..4096].to_vec();
        bytes[4] = 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(obstacle(&path).unwrap(), Some((path.clone(), Obstacle::Foreign)));
        bytes[4] = 2;
        let whole = bytes.clone();
        let judged = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            obstacle(&path).map_err(|error| error.kind())
        };
        let segments = bytes[64..].chunks_exact_mut(56).take(usize::from(whole[56]));
        segments.filter(|segment| segment[..4] == [3, 0, 0, 0]).for_each(|segment| segment[0] = 0);
        assert_eq!(judged(&bytes), Ok(Some((path.clone(), Obstacle::Static))));
        assert_eq!(judged(&whole[..20]), Err(ErrorKind::UnexpectedEof));
        assert_eq!(judged(&whole[..70]), Err(ErrorKind::UnexpectedEof));
        // No class, no type, no segments.
        for at in [4, 16, 56] {
            bytes.clone_from(&whole);
            bytes[at..at + 2].fill(0);
            assert_eq!(judged(&bytes), Err(ErrorKind::InvalidData), "{at}");
        }
        fs::remove_file(&path).unwrap();
    }
}
