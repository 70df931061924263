//! The SWAPSPACE2 header: the first page of a device, as `mkswap` writes it.
//!
//! The page holds the header and so never data, and what lies beyond the last page that it names is not for swap.
//!
//! | bytes | what |
//! |---|---|
//! | 0 to 1023 | a boot block, left to its owner |
//! | 1024, 1028, 1032 | version (1), last page, number of bad pages: 32 bits each |
//! | 1036, 1052 | UUID and label, 16 bytes each: not read here |
//! | 1536 on | the bad pages, 32 bits each: who has any is refused |
//! | 4086 to 4095 | the signature `SWAPSPACE2` |
//!
//! Numbers are in the byte order of the machine that wrote them; both orders are read.

use super::Bytes;
use crate::device::PAGE;
use core::fmt;

const SIGNATURE: &[u8; 10] = b"SWAPSPACE2";
const OLD_SIGNATURE: &[u8; 10] = b"SWAP-SPACE";
/// What hibernation puts in the signature's place: the image would be lost.
const HIBERNATION: [&[u8]; 4] = [b"S1SUSPEND", b"S2SUSPEND", b"ULSUSPEND", b"LINHIB0001"];
const SIGNATURE_LEN: usize = SIGNATURE.len();

const VERSION_AT: usize = 1024;
const LAST_PAGE_AT: usize = 1028;
const BAD_COUNT_AT: usize = 1032;
const LABEL_AT: usize = 1052;
const LABEL: &[u8; 7] = b"pageout";

/// The largest page size of any machine, which is where the search for signatures ends.
pub(super) const FOREIGN_PAGE_MAX: usize = 64 << 10;

/// Why a header is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeaderError {
    /// No header at all.
    NoSignature,
    /// The format of before Linux 2.1.117.
    OldFormat,
    /// A hibernation image lies there.
    Hibernation,
    /// Made for a machine with pages of this many bytes.
    PageSize(usize),
    /// A version other than 1.
    Version(u32),
    /// The last page is the header's own.
    Empty,
    /// The header speaks of more bytes than the device has.
    Size {
        /// Bytes that the header speaks of.
        header: u64,
        /// Bytes of the device.
        device: u64,
    },
    /// It lists so many bad pages.
    BadPages(u32),
}

impl fmt::Display for HeaderError {
    /// The reason and what to do, to stand behind the device's path in a message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoSignature => write!(f, "no swap header; run mkswap on it"),
            Self::OldFormat => write!(f, "swap header of the old format; run mkswap on it"),
            Self::Hibernation => write!(f, "holds a hibernation image; resume from it, or run mkswap on it"),
            Self::PageSize(found) => {
                write!(f, "swap header for pages of {}, not 4K; run mkswap on it", Bytes(found as u64))
            }
            Self::Version(found) => write!(f, "swap header of version {found}, not 1; run mkswap on it"),
            Self::Empty => write!(f, "swap header of a device without pages; run mkswap on it"),
            Self::Size { header, device } => write!(
                f,
                "swap header for {}, but the device has {}; enlarge it or run mkswap on it",
                Bytes(header),
                Bytes(device)
            ),
            Self::BadPages(count) => {
                write!(f, "its header lists {count} bad pages; name a device without")
            }
        }
    }
}

impl core::error::Error for HeaderError {}

/// The bytes that the header in a device's `first` bytes speaks of, its own page included, for a device of `device_len`: what
/// lies beyond is not for swap. With 64K a header for another page size is told from none.
pub(super) fn bytes_of(first: &[u8], device_len: u64) -> Result<u64, HeaderError> {
    signature(first)?;
    let raw = |at: usize| [first[at], first[at + 1], first[at + 2], first[at + 3]];
    let swapped = u32::from_ne_bytes(raw(VERSION_AT)) == 1u32.swap_bytes();
    let number = |at: usize| {
        let number = u32::from_ne_bytes(raw(at));
        if swapped {
            number.swap_bytes()
        } else {
            number
        }
    };
    let version = number(VERSION_AT);
    if version != 1 {
        return Err(HeaderError::Version(version));
    }
    let last_page = number(LAST_PAGE_AT);
    if last_page == 0 {
        return Err(HeaderError::Empty);
    }
    let header = (u64::from(last_page) + 1) * PAGE as u64;
    if header > device_len {
        return Err(HeaderError::Size { header, device: device_len });
    }
    match number(BAD_COUNT_AT) {
        0 => Ok(header),
        count => Err(HeaderError::BadPages(count)),
    }
}

/// The first page of a device of so many bytes, whole pages, as mkswap writes it, with our name as its label.
pub fn page(bytes: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    // No more has a number: 16 TiB.
    let last = (bytes / PAGE as u64).saturating_sub(1).min(u32::MAX.into()) as u32;
    for (at, number) in [(VERSION_AT, 1), (LAST_PAGE_AT, last)] {
        page[at..at + 4].copy_from_slice(&number.to_ne_bytes());
    }
    page[LABEL_AT..LABEL_AT + LABEL.len()].copy_from_slice(LABEL);
    page[PAGE - SIGNATURE_LEN..].copy_from_slice(SIGNATURE);
    page
}

/// Finds our signature at the end of a page, or says what lies there instead.
fn signature(first: &[u8]) -> Result<(), HeaderError> {
    let ends_with = |page: usize| first.get(page - SIGNATURE_LEN..page);
    let here = ends_with(PAGE).unwrap_or_default();
    if here == SIGNATURE {
        return Ok(());
    }
    if here == OLD_SIGNATURE {
        return Err(HeaderError::OldFormat);
    }
    if HIBERNATION.iter().any(|image| here.starts_with(image)) {
        return Err(HeaderError::Hibernation);
    }
    let mut page = 2 * PAGE;
    while page <= FOREIGN_PAGE_MAX {
        if ends_with(page) == Some(SIGNATURE.as_slice()) {
            return Err(HeaderError::PageSize(page));
        }
        page *= 2;
    }
    Err(HeaderError::NoSignature)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 1 << 20;

    fn refused(page: &[u8]) -> HeaderError {
        let error = bytes_of(page, LEN).unwrap_err();
        std::println!("{error}");
        error
    }

    #[test]
    fn what_it_says_is_read() {
        assert_eq!(bytes_of(&page(LEN), LEN), Ok(LEN));
    }

    #[test]
    fn the_other_byte_order_is_read() {
        let mut page = page(LEN);
        for at in [VERSION_AT, LAST_PAGE_AT, BAD_COUNT_AT] {
            page[at..at + 4].reverse();
        }
        assert_eq!(bytes_of(&page, LEN), Ok(LEN));
    }

    #[test]
    fn wrong_headers_are_refused_with_their_reasons() {
        let put = |at: usize, number: u32| {
            let mut page = page(LEN);
            page[at..at + 4].copy_from_slice(&number.to_ne_bytes());
            page
        };
        let sign = |with: &[u8]| {
            let mut page = page(LEN);
            page[PAGE - 10..][..with.len()].copy_from_slice(with);
            page
        };
        assert_eq!(refused(&[0; PAGE]), HeaderError::NoSignature);
        assert_eq!(refused(&sign(b"SWAPSPACE3")), HeaderError::NoSignature);
        assert_eq!(refused(&sign(b"SWAP-SPACE")), HeaderError::OldFormat);
        assert_eq!(refused(&sign(b"S1SUSPEND\0")), HeaderError::Hibernation);
        assert_eq!(refused(&put(VERSION_AT, 2)), HeaderError::Version(2));
        assert_eq!(refused(&put(LAST_PAGE_AT, 0)), HeaderError::Empty);
        let larger = HeaderError::Size { header: 257 * 4096, device: LEN };
        assert_eq!(refused(&put(LAST_PAGE_AT, 256)), larger);
        assert_eq!(refused(&put(BAD_COUNT_AT, 4)), HeaderError::BadPages(4));
        assert_eq!(refused(&[0; 100]), HeaderError::NoSignature);
        let mut foreign = std::vec![0; 64 << 10];
        foreign[(16 << 10) - 10..16 << 10].copy_from_slice(SIGNATURE);
        assert_eq!(refused(&foreign), HeaderError::PageSize(16 << 10));
    }
}
