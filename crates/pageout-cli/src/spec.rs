//! What `--swap` takes, as words. Opening what it names is `device`'s.

use std::path::{Path, PathBuf};

use anyhow::{bail, Result};
use pageout::device::{RESERVED, TAGS};

use crate::size::Bytes;

/// `PATH[,size=8G][,pri=5][,discard][,rotational]` or `mem[,...]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Where pages go.
    pub place: Place,
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
pub enum Place {
    /// Memory that is not the program's.
    Memory,
    /// A file or block device.
    Path(PathBuf),
    /// A file without a name.
    Unnamed,
}

const TAKES: &str = "PATH or mem, then any of ,size=8G ,pri=5 ,discard ,rotational";

impl Spec {
    /// A file without a name, at a place of our choice.
    pub const fn unnamed() -> Self {
        Self { place: Place::Unnamed, size: None, priority: None, discard: true, rotational: false }
    }

    /// Reads a specification. No path can have a comma.
    pub fn parse(text: &str) -> Result<Self> {
        let mut parts = text.split(',');
        let place = match parts.next() {
            None | Some("") => bail!("{text}: takes {TAKES}"),
            Some("mem") => Place::Memory,
            Some(name) if RESERVED.contains(&name) => {
                bail!("{text}: no memory is compressed yet; name a file of that name as ./{name}")
            }
            Some(path) => Place::Path(tagged(path).unwrap_or_else(|| path.into())),
        };
        let mut spec = Self { place, ..Self::unnamed() };
        spec.discard = false;
        for part in parts {
            match part.split_once('=').map_or((part, None), |(name, value)| (name, Some(value))) {
                ("size", Some(value)) => match value.parse() {
                    Ok(size) => spec.size = Some(size),
                    Err(_) => bail!("{text}: size={value}: takes a size like 8G, less than 16E"),
                },
                ("pri", Some(value)) => match value.parse() {
                    Ok(priority) if (-1..=32767).contains(&priority) => spec.priority = Some(priority),
                    _ => bail!("{text}: pri={value}: takes a number from -1 to 32767"),
                },
                ("discard", None) => spec.discard = true,
                ("rotational", None) => spec.rotational = true,
                _ => bail!("{text}: {part}: takes {TAKES}"),
            }
        }
        Ok(spec)
    }
}

/// Where udev has a disk that is named by a tag, as swapon(8) takes it.
fn tagged(name: &str) -> Option<PathBuf> {
    let (tag, value) = name.split_once('=')?;
    TAGS.contains(&tag)
        .then(|| Path::new("/dev/disk").join(format!("by-{}", tag.to_ascii_lowercase())).join(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_all_of_it() {
        let spec = Spec::parse("/swap/a,size=1.5G,pri=5,discard,rotational").unwrap();
        assert_eq!(spec.place, Place::Path("/swap/a".into()));
        assert_eq!(spec.size, Some(Bytes(3 << 29)));
        assert_eq!(spec.priority, Some(5));
        assert!(spec.discard && spec.rotational);
        assert_eq!(Spec::parse("mem").unwrap().place, Place::Memory);
        assert_eq!(Spec::parse("./mem").unwrap().place, Place::Path("./mem".into()));
        let disk = Place::Path("/dev/disk/by-partuuid/3-02".into());
        assert_eq!(Spec::parse("PARTUUID=3-02,pri=1").unwrap().place, disk);
        assert_eq!(Spec::parse("./UUID=3").unwrap().place, Place::Path("./UUID=3".into()));
    }

    #[test]
    fn complains_in_one_line() {
        let says = |text| Spec::parse(text).unwrap_err().to_string();
        let takes = "takes PATH or mem, then any of ,size=8G ,pri=5 ,discard ,rotational";
        assert_eq!(says(""), format!(": {takes}"));
        assert_eq!(says("mem,fast"), format!("mem,fast: fast: {takes}"));
        assert_eq!(says("mem,discard=1"), format!("mem,discard=1: discard=1: {takes}"));
        assert_eq!(says("a,size=x"), "a,size=x: size=x: takes a size like 8G, less than 16E");
        assert_eq!(
            says("lz4,size=1G"),
            "lz4,size=1G: no memory is compressed yet; name a file of that name as ./lz4"
        );
        assert_eq!(says("a,pri=99999"), "a,pri=99999: pri=99999: takes a number from -1 to 32767");
    }
}
