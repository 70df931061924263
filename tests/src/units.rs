//! Sizes as people write them.

/// As `pageout` reads them.
pub fn parse_size(text: &str) -> Option<usize> {
    text.parse().ok().map(|pageout::Bytes(bytes)| bytes as usize)
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
