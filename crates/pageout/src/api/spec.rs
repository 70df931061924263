//! What names a device, in words: `PATH[,size=8G][,pri=5][,discard][,rotational]` or `mem[,...]`, for `pageout run --swap` and for
//! a `Swap`. Opening what it names is for who reads it.

use super::Bytes;
use core::fmt;
use std::format;
use std::path::{Path, PathBuf};
use std::string::String;
use std::vec::Vec;

/// Disks may be named by these tags, as swapon(8) takes them.
const TAGS: [&str; 4] = ["UUID", "LABEL", "PARTUUID", "PARTLABEL"];
/// Words for memory that is compressed, which there is none of yet.
const RESERVED: [&str; 3] = ["lz4", "zram", "zstd"];
const TAKES: &str = "takes PATH or mem, then any of ,size=8G ,pri=5 ,discard ,rotational";

/// A specification, read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Where pages go.
    pub backing: Backing,
    /// Most bytes that may be used.
    pub size: Option<Bytes>,
    /// Higher is used first.
    pub priority: Option<i32>,
    /// Give freed room back to the device.
    pub discard: bool,
    /// A disk that turns: keep to ascending order.
    pub rotational: bool,
}

/// Where pages go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backing {
    /// Memory that is not the program's.
    Memory,
    /// A file or block device.
    Path(PathBuf),
    /// A file without a name.
    Unnamed,
}

/// A text that is no specification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotASpec {
    /// As it was given.
    pub spec: String,
    /// What is wrong with it and what it takes, in one line.
    pub why: String,
}

impl fmt::Display for NotASpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = if self.spec.is_empty() { "(empty)" } else { &self.spec };
        write!(f, "{spec}: {}", self.why)
    }
}

impl core::error::Error for NotASpec {}

impl Spec {
    /// A file without a name, at a place of the reader's choice.
    pub const fn unnamed() -> Self {
        Self { backing: Backing::Unnamed, size: None, priority: None, discard: true, rotational: false }
    }

    /// Reads a specification. No path can have a comma.
    pub fn parse(text: &str) -> Result<Self, NotASpec> {
        Self::read(text).map_err(|why| NotASpec { spec: text.into(), why })
    }

    fn read(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let backing = match parts.next() {
            None | Some("") => return Err(TAKES.into()),
            Some(name) if name.contains('\0') => return Err("no file has a zero byte in its name".into()),
            Some("mem") => Backing::Memory,
            Some(name) if RESERVED.contains(&name) => {
                return Err(format!("no memory is compressed yet; name a file of that name as ./{name}"));
            }
            Some(path) => Backing::Path(tagged(path).unwrap_or_else(|| path.into())),
        };
        let mut spec = Self { backing, discard: false, ..Self::unnamed() };
        let mut given = Vec::new();
        for part in parts {
            let (name, value) =
                part.split_once('=').map_or((part, None), |(name, value)| (name, Some(value)));
            if given.contains(&name) {
                return Err(format!("{name} is given twice; give it once"));
            }
            given.push(name);
            match (name, value) {
                ("size", Some(value)) => match value.parse() {
                    Ok(size) => spec.size = Some(size),
                    Err(_) => {
                        return Err(format!("size={value}: takes a size like 8G, with K, M, G, T or P"))
                    }
                },
                ("pri", Some(value)) => match value.parse() {
                    Ok(priority) if (-1..=32767).contains(&priority) => spec.priority = Some(priority),
                    _ => return Err(format!("pri={value}: takes a number from -1 to 32767")),
                },
                ("discard", None) => spec.discard = true,
                ("rotational", None) => spec.rotational = true,
                ("", None) => return Err(format!("nothing behind a comma: {TAKES}")),
                _ => return Err(format!("{part}: {TAKES}")),
            }
        }
        Ok(spec)
    }
}

/// Where udev has a disk that is named by a tag.
fn tagged(name: &str) -> Option<PathBuf> {
    let (tag, value) = name.split_once('=')?;
    let directory = format!("by-{}", tag.to_ascii_lowercase());
    TAGS.contains(&tag).then(|| Path::new("/dev/disk").join(directory).join(encoded(value)))
}

/// A value as udev writes it into the name of a link: other than these characters of ASCII as \x20. What is written so
/// already stays, which also is the way to give a comma.
fn encoded(value: &str) -> String {
    let bytes = value.as_bytes();
    let is_encoded = |at: usize| {
        bytes[at..].starts_with(b"\\x")
            && bytes.get(at + 2..at + 4).is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit))
    };
    let mut name = String::new();
    for (at, letter) in value.char_indices() {
        match letter {
            '\\' if is_encoded(at) => name.push(letter),
            letter if !letter.is_ascii() || letter.is_ascii_alphanumeric() || "#+-.:=@_".contains(letter) => {
                name.push(letter)
            }
            letter => name.push_str(&format!("\\x{:02x}", letter as u32)),
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn reads_all_of_it() {
        let spec = Spec::parse("/swap/a,size=1.5G,pri=5,discard,rotational").unwrap();
        assert_eq!(spec.backing, Backing::Path("/swap/a".into()));
        assert_eq!(spec.size, Some(Bytes(3 << 29)));
        assert_eq!(spec.priority, Some(5));
        assert!(spec.discard && spec.rotational);
        assert_eq!(Spec::parse("mem").unwrap().backing, Backing::Memory);
        assert_eq!(Spec::parse("./mem").unwrap().backing, Backing::Path("./mem".into()));
        let disk = Backing::Path("/dev/disk/by-partuuid/3-02".into());
        assert_eq!(Spec::parse("PARTUUID=3-02,pri=1").unwrap().backing, disk);
        assert_eq!(Spec::parse("./UUID=3").unwrap().backing, Backing::Path("./UUID=3".into()));
    }

    #[test]
    fn tags_name_the_links_that_udev_makes() {
        let link = |text| match Spec::parse(text).unwrap().backing {
            Backing::Path(path) => path.to_str().unwrap().to_string(),
            backing => panic!("{backing:?}"),
        };
        assert_eq!(link("PARTLABEL=Linux swap"), "/dev/disk/by-partlabel/Linux\\x20swap");
        assert_eq!(link("PARTLABEL=Linux\\x20swap"), "/dev/disk/by-partlabel/Linux\\x20swap");
        assert_eq!(link("LABEL=../a\\b\\x2"), "/dev/disk/by-label/..\\x2fa\\x5cb\\x5cx2");
        assert_eq!(link("LABEL=A\\x2cB (1)#+-.:=@_é"), "/dev/disk/by-label/A\\x2cB\\x20\\x281\\x29#+-.:=@_é");
    }

    #[test]
    fn complains_in_one_line() {
        let says = |text| Spec::parse(text).unwrap_err().why;
        let takes = "takes PATH or mem, then any of ,size=8G ,pri=5 ,discard ,rotational";
        assert_eq!(Spec::parse("mem,fast").unwrap_err().to_string(), format!("mem,fast: fast: {takes}"));
        assert_eq!(Spec::parse("").unwrap_err().to_string(), format!("(empty): {takes}"));
        assert_eq!(says(",size=1G"), takes);
        assert_eq!(says("mem,fast"), format!("fast: {takes}"));
        assert_eq!(says("mem,"), format!("nothing behind a comma: {takes}"));
        assert_eq!(says("a\0b"), "no file has a zero byte in its name");
        assert_eq!(says("mem,discard=1"), format!("discard=1: {takes}"));
        assert_eq!(says("a,size=x"), "size=x: takes a size like 8G, with K, M, G, T or P");
        assert_eq!(says("lz4,size=1G"), "no memory is compressed yet; name a file of that name as ./lz4");
        assert_eq!(says("a,size=1G,pri=1,size=2G"), "size is given twice; give it once");
        assert_eq!(says("a,pri=99999"), "pri=99999: takes a number from -1 to 32767");
    }
}
