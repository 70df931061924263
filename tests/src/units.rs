//! Sizes as people write them.

/// Bytes in `512`, `64K`, `256M` or `1G`.
pub fn parse_size(text: &str) -> Option<usize> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}

/// The size in whole MiB.
pub fn in_mib(bytes: usize) -> String {
    format!("{}M", bytes >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_written() {
        assert_eq!(parse_size("256M"), Some(256 << 20));
        assert_eq!(parse_size("7"), Some(7));
        assert_eq!(parse_size("1G"), Some(1 << 30));
        assert_eq!(parse_size(""), None);
        assert_eq!(parse_size("xM"), None);
        assert_eq!(in_mib(3 << 20), "3M");
    }
}
