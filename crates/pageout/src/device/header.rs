//! The SWAPSPACE2 header: the first page of a device, as `mkswap` writes it and `blkid` and `swaplabel`
//! read it.
//!
//! The page holds the header and so never data: **slot 0 of a device is always unusable**, and so are
//! the bad pages that the header lists. Whoever hands out slots starts at 1 and asks
//! [`Header::is_usable`].
//!
//! | bytes | what |
//! |---|---|
//! | 0 to 1023 | a boot block, left to its owner |
//! | 1024, 1028, 1032 | version (1), last page, number of bad pages: 32 bits each |
//! | 1036, 1052 | UUID and label, 16 bytes each |
//! | 1536 on | the bad pages, 32 bits each, at most 637 |
//! | 4086 to 4095 | the signature `SWAPSPACE2` |
//!
//! Numbers are in the byte order of the machine that wrote them; both orders are read.

use super::{Device, Errno, Run, PAGE};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

const SIGNATURE: &[u8; 10] = b"SWAPSPACE2";
const OLD_SIGNATURE: &[u8; 10] = b"SWAP-SPACE";
/// What hibernation puts in the signature's place: the image would be lost.
const HIBERNATION: [&[u8]; 4] = [b"S1SUSPEND", b"S2SUSPEND", b"ULSUSPEND", b"LINHIB0001"];
const SIGNATURE_LEN: usize = SIGNATURE.len();

const VERSION_AT: usize = 1024;
const LAST_PAGE_AT: usize = 1028;
const BAD_COUNT_AT: usize = 1032;
const UUID_AT: usize = 1036;
const LABEL_AT: usize = 1052;
const BAD_PAGES_AT: usize = 1536;
const LABEL_LEN: usize = 16;

/// The most bad pages that a header can list.
pub const BAD_PAGES_MAX: usize = (PAGE - SIGNATURE_LEN - BAD_PAGES_AT) / 4;

/// The fewest pages of a device, header included: below that `mkswap` refuses too.
pub const PAGES_MIN: u64 = 10;

/// The largest page size of any machine, which is where the search for signatures ends.
const FOREIGN_PAGE_MAX: usize = 64 << 10;

/// Why a header is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderError {
    /// The device could not be read or written.
    Io(Errno),
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
    /// Fewer than [`PAGES_MIN`] pages; the device's bytes.
    TooSmall(u64),
    /// More bad pages than a header can list.
    BadPageCount(u32),
    /// A bad page that is the header's own or lies beyond the last.
    BadPage(u32),
    /// A label of more than 15 bytes, or with a zero byte.
    Label,
}

impl fmt::Display for HeaderError {
    /// The reason and what to do, to stand behind the device's path in a message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Io(errno) => write!(f, "cannot read or write the swap header: {errno}"),
            Self::NoSignature => write!(f, "no swap header; run mkswap on it"),
            Self::OldFormat => write!(f, "swap header of the old format; run mkswap on it"),
            Self::Hibernation => write!(f, "holds a hibernation image; resume from it, or run mkswap on it"),
            Self::PageSize(found) => {
                write!(f, "swap header for pages of {}, not 4K; run mkswap on it", Size(found as u64))
            }
            Self::Version(found) => write!(f, "swap header of version {found}, not 1; run mkswap on it"),
            Self::Empty => write!(f, "swap header of a device without pages; run mkswap on it"),
            Self::Size { header, device } => write!(
                f,
                "swap header for {}, but the device has {}; enlarge it or run mkswap on it",
                Size(header),
                Size(device)
            ),
            Self::TooSmall(len) => {
                write!(f, "{} is too small; it takes {}", Size(len), Size(PAGES_MIN * PAGE as u64))
            }
            Self::BadPageCount(count) => {
                write!(f, "swap header with {count} bad pages, more than {BAD_PAGES_MAX}; run mkswap on it")
            }
            Self::BadPage(page) => {
                write!(f, "swap header with a bad page {page} outside the device; run mkswap on it")
            }
            Self::Label => write!(f, "a label has at most 15 bytes"),
        }
    }
}

impl core::error::Error for HeaderError {}

/// Bytes as users see them: the largest unit that leaves at least 1, with one decimal where it has one.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = (self.0.max(1).ilog2() / 10).min(6);
        let letter = ["B", "K", "M", "G", "T", "P", "E"][unit as usize];
        let tenths = ((u128::from(self.0) * 10) >> (10 * unit)) as u64;
        match (tenths / 10, tenths % 10) {
            (whole, 0) => write!(f, "{whole}{letter}"),
            (whole, tenth) => write!(f, "{whole}.{tenth}{letter}"),
        }
    }
}

/// What a header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    last_page: u32,
    uuid: [u8; 16],
    label: [u8; LABEL_LEN],
    /// Ascending, none twice.
    bad_pages: Vec<u32>,
}

impl Header {
    /// A header for a device of `device_len` bytes, without bad pages. Of a device above 16T the first 16T
    /// are used: the format has 32 bits for a page. `label` has at most 15 bytes.
    pub fn new(device_len: u64, uuid: [u8; 16], label: &str) -> Result<Self, HeaderError> {
        let pages = device_len / PAGE as u64;
        if pages < PAGES_MIN {
            return Err(HeaderError::TooSmall(device_len));
        }
        let mut field = [0; LABEL_LEN];
        if label.len() >= LABEL_LEN || label.as_bytes().contains(&0) {
            return Err(HeaderError::Label);
        }
        field[..label.len()].copy_from_slice(label.as_bytes());
        let last_page = u32::try_from(pages - 1).unwrap_or(u32::MAX);
        Ok(Self { last_page, uuid, label: field, bad_pages: Vec::new() })
    }

    /// The last page that may be used; the first is 1.
    pub fn last_page(&self) -> u32 {
        self.last_page
    }

    /// The bytes that the header speaks of, its own page included: what lies beyond is not for swap.
    pub fn bytes(&self) -> u64 {
        bytes_to(self.last_page)
    }

    /// The device's UUID.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// The device's label: bytes of no certain encoding, without the zeros at the end.
    pub fn label(&self) -> &[u8] {
        let len = self.label.iter().position(|&byte| byte == 0).unwrap_or(LABEL_LEN);
        &self.label[..len]
    }

    /// The pages that must not be used, ascending.
    pub fn bad_pages(&self) -> &[u32] {
        &self.bad_pages
    }

    /// Whether a page may hold data: not the header's own, not a bad one, not beyond the end.
    pub fn is_usable(&self, page: u64) -> bool {
        let Ok(page) = u32::try_from(page) else { return false };
        page != 0 && page <= self.last_page && self.bad_pages.binary_search(&page).is_err()
    }

    /// Reads the header out of a device's first bytes, at least a page, for a device of `device_len`
    /// bytes. With 64K a header for another page size is told from none.
    pub fn parse(first: &[u8], device_len: u64) -> Result<Self, HeaderError> {
        let Some(page) = first.first_chunk::<PAGE>() else { return Err(HeaderError::TooSmall(device_len)) };
        signature(first)?;
        let raw = |at: usize| [page[at], page[at + 1], page[at + 2], page[at + 3]];
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
        let header_len = bytes_to(last_page);
        if header_len > device_len {
            return Err(HeaderError::Size { header: header_len, device: device_len });
        }
        let count = number(BAD_COUNT_AT);
        if count as usize > BAD_PAGES_MAX {
            return Err(HeaderError::BadPageCount(count));
        }
        let mut bad_pages: Vec<u32> =
            (0..count as usize).map(|place| number(BAD_PAGES_AT + 4 * place)).collect();
        if let Some(&page) = bad_pages.iter().find(|&&page| page == 0 || page > last_page) {
            return Err(HeaderError::BadPage(page));
        }
        bad_pages.sort_unstable();
        bad_pages.dedup();
        let (mut uuid, mut label) = ([0; 16], [0; LABEL_LEN]);
        uuid.copy_from_slice(&page[UUID_AT..UUID_AT + 16]);
        label.copy_from_slice(&page[LABEL_AT..LABEL_AT + LABEL_LEN]);
        Ok(Self { last_page, uuid, label, bad_pages })
    }

    /// Puts the header into a device's first page, whose boot block it leaves alone.
    pub fn encode(&self, page: &mut [u8; PAGE]) {
        page[VERSION_AT..].fill(0);
        let mut put = |at: usize, number: u32| page[at..at + 4].copy_from_slice(&number.to_ne_bytes());
        put(VERSION_AT, 1);
        put(LAST_PAGE_AT, self.last_page);
        put(BAD_COUNT_AT, self.bad_pages.len() as u32);
        for (place, &bad) in self.bad_pages.iter().enumerate() {
            put(BAD_PAGES_AT + 4 * place, bad);
        }
        page[UUID_AT..UUID_AT + 16].copy_from_slice(&self.uuid);
        page[LABEL_AT..LABEL_AT + LABEL_LEN].copy_from_slice(&self.label);
        page[PAGE - SIGNATURE_LEN..].copy_from_slice(SIGNATURE);
    }

    /// Reads the header of a device of `device_len` bytes. Allocates; not for the fault path.
    pub fn read(device: &dyn Device, device_len: u64) -> Result<Self, HeaderError> {
        if device_len < PAGES_MIN * PAGE as u64 {
            return Err(HeaderError::TooSmall(device_len));
        }
        let mut first = Box::new(First([0; FOREIGN_PAGE_MAX]));
        let len = (device_len as usize).min(FOREIGN_PAGE_MAX) / PAGE * PAGE;
        let run = Run { at: 0, address: first.0.as_mut_ptr() as usize, len };
        // SAFETY: the buffer is this function's, and looked at only after the call.
        unsafe { device.read(run) }.map_err(HeaderError::Io)?;
        Self::parse(&first.0[..len], device_len)
    }

    /// Writes the header to a device, whose boot block it leaves alone, and flushes. What else was on the
    /// device is lost to its owner: ask before. Allocates.
    pub fn write(&self, device: &dyn Device) -> Result<(), HeaderError> {
        let mut first = Box::new(First([0; PAGE]));
        let run = Run { at: 0, address: first.0.as_mut_ptr() as usize, len: PAGE };
        // SAFETY: the buffer is this function's, and looked at only after the call.
        unsafe { device.read(run) }.map_err(HeaderError::Io)?;
        self.encode(&mut first.0);
        let mut result = [Ok(())];
        // SAFETY: as above.
        unsafe { device.write_batch(&[run], &mut result) };
        result[0].and_then(|()| device.flush()).map_err(HeaderError::Io)
    }
}

/// The bytes from the header's own page to the end of `last_page`.
fn bytes_to(last_page: u32) -> u64 {
    (u64::from(last_page) + 1) * PAGE as u64
}

/// The first bytes of a device, aligned for O_DIRECT.
#[repr(C, align(4096))]
struct First<const LEN: usize>([u8; LEN]);

/// A random UUID (version 4).
pub fn random_uuid() -> Result<[u8; 16], Errno> {
    let mut uuid = [0; 16];
    // 16 bytes come whole or not at all.
    rustix::rand::getrandom(&mut uuid, rustix::rand::GetRandomFlags::empty())?;
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(uuid)
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
    use std::format;
    use std::string::ToString;

    const LEN: u64 = 1 << 20;

    fn page() -> [u8; PAGE] {
        let mut page = [0; PAGE];
        Header::new(LEN, *b"0123456789abcdef", "swap here").unwrap().encode(&mut page);
        page
    }

    fn refused(page: &[u8]) -> HeaderError {
        let error = Header::parse(page, LEN).unwrap_err();
        std::println!("{error}");
        error
    }

    #[test]
    fn what_is_written_is_read() {
        let header = Header::parse(&page(), LEN).unwrap();
        assert_eq!((header.last_page(), header.bytes()), (255, LEN));
        assert_eq!(&header.uuid(), b"0123456789abcdef");
        assert_eq!(header.label(), b"swap here");
        assert!(!header.is_usable(0), "the header's own page");
        assert!(header.is_usable(1) && header.is_usable(255) && !header.is_usable(256));
    }

    #[test]
    fn bad_pages_are_listed_and_unusable() {
        let mut header = Header::parse(&page(), LEN).unwrap();
        header.bad_pages = std::vec![3, 17, 255];
        let mut bytes = page();
        header.encode(&mut bytes);
        let back = Header::parse(&bytes, LEN).unwrap();
        assert_eq!(back, header);
        assert!(!back.is_usable(17) && back.is_usable(18) && !back.is_usable(255));
    }

    #[test]
    fn the_boot_block_stays() {
        let mut page = [0xb0; PAGE];
        Header::new(LEN, [1; 16], "").unwrap().encode(&mut page);
        assert!(page[..1024].iter().all(|&byte| byte == 0xb0));
        assert_eq!(Header::parse(&page, LEN).unwrap().label(), b"");
    }

    #[test]
    fn the_other_byte_order_is_read() {
        let mut page = page();
        for at in [VERSION_AT, LAST_PAGE_AT, BAD_COUNT_AT] {
            page[at..at + 4].reverse();
        }
        assert_eq!(Header::parse(&page, LEN).unwrap().last_page(), 255);
    }

    #[test]
    fn wrong_headers_are_refused_with_their_reasons() {
        let put = |at: usize, number: u32| {
            let mut page = page();
            page[at..at + 4].copy_from_slice(&number.to_ne_bytes());
            page
        };
        let sign = |with: &[u8]| {
            let mut page = page();
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
        assert_eq!(refused(&put(BAD_COUNT_AT, 638)), HeaderError::BadPageCount(638));
        assert_eq!(refused(&put(BAD_COUNT_AT, 1)), HeaderError::BadPage(0));
        let mut beyond = put(BAD_COUNT_AT, 1);
        beyond[BAD_PAGES_AT..BAD_PAGES_AT + 4].copy_from_slice(&256u32.to_ne_bytes());
        assert_eq!(refused(&beyond), HeaderError::BadPage(256));
        assert_eq!(refused(&[0; 100]), HeaderError::TooSmall(LEN));
        let mut foreign = std::vec![0; 64 << 10];
        foreign[(16 << 10) - 10..16 << 10].copy_from_slice(SIGNATURE);
        assert_eq!(refused(&foreign), HeaderError::PageSize(16 << 10));
    }

    #[test]
    fn small_devices_and_long_labels_are_refused() {
        let new = |len, label| Header::new(len, [0; 16], label).map(|_| ());
        assert_eq!(new(9 * 4096, ""), Err(HeaderError::TooSmall(9 * 4096)));
        assert_eq!(new(10 * 4096, "fifteen letters"), Ok(()));
        assert_eq!(new(10 * 4096, "sixteen letters!"), Err(HeaderError::Label));
        assert_eq!(Header::new(1 << 50, [0; 16], "").unwrap().last_page(), u32::MAX);
    }

    #[test]
    fn sizes_are_printed_for_people() {
        for (bytes, text) in [(0, "0B"), (100, "100B"), (4096, "4K"), (3 << 29, "1.5G"), (u64::MAX, "15.9E")]
        {
            assert_eq!(format!("{}", Size(bytes)), text.to_string());
        }
    }
}
