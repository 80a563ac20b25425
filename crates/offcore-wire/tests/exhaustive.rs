//! Exhaustive tests: every value of each length field, and every short sequence of bytes that parsers recognize.

#![allow(clippy::unwrap_used, reason = "the helpers of a test are part of it")]

use offcore_wire::{
    Fragment, IpProtocol, Ipv4Packet, Ipv6Packet, TcpOptions, TcpSegment, UdpDatagram, ipv6::TransportHeader,
};

/// Returns different bytes, so that the position of a part can be identified.
fn numbered<const N: usize>() -> [u8; N] {
    std::array::from_fn(|at| at as u8)
}

/// Calls `each` with all sequences of up to `most` of these bytes.
fn rows(alphabet: &[u8], most: u32, mut each: impl FnMut(&[u8])) {
    for len in 0..=most {
        for number in 0..alphabet.len().pow(len) {
            let (mut row, mut rest) = ([0; 16], number);
            for byte in &mut row[..len as usize] {
                *byte = alphabet[rest % alphabet.len()];
                rest /= alphabet.len();
            }
            each(&row[..len as usize]);
        }
    }
}

#[test]
fn every_data_offset() {
    let mut bytes = numbered::<80>();
    for offset in 0..=u8::MAX {
        bytes[12] = offset;
        let header = usize::from(offset >> 4) * 4;
        for len in 0..=bytes.len() {
            let fits = header >= 20 && header <= len;
            let segment = TcpSegment::new_checked(&bytes[..len]);
            assert_eq!(segment.is_ok(), fits, "offset {offset:#x} in {len} bytes");
            if let Ok(segment) = segment {
                let parts = (segment.options(), segment.payload());
                assert_eq!(parts, (&bytes[20..header], &bytes[header..len]));
            }
        }
    }
}

#[test]
fn every_length_of_a_datagram() {
    let mut bytes = numbered::<24>();
    for length in 0..=u16::MAX {
        bytes[4..6].copy_from_slice(&length.to_be_bytes());
        for len in 0..=bytes.len() {
            let end = usize::from(length);
            let datagram = UdpDatagram::new_checked(&bytes[..len]);
            let expected = (len >= 8 && end >= 8 && end <= len).then(|| &bytes[8..end]);
            assert_eq!(datagram.ok().map(|datagram| datagram.payload()), expected, "{length} in {len} bytes");
        }
    }
}

#[test]
fn every_first_byte_and_length_of_ipv4() {
    let mut bytes = numbered::<72>();
    for first in 0..=u8::MAX {
        bytes[0] = first;
        let header = usize::from(first & 15) * 4;
        for total in (0..80).chain([255, 256, u16::MAX]) {
            bytes[2..4].copy_from_slice(&total.to_be_bytes());
            for len in [0, 1, 19, 20, 21, 23, 24, 40, 59, 60, 61, 72] {
                let end = usize::from(total);
                let fits = first >> 4 == 4 && header >= 20 && header <= end && end <= len;
                let packet = Ipv4Packet::new_checked(&bytes[..len]);
                let expected = fits.then(|| (header, &bytes[header..end]));
                let found = packet.ok().map(|packet| (packet.header_len(), packet.payload()));
                assert_eq!(found, expected, "{first:#x}, total {total}, in {len} bytes");
            }
        }
    }
}

#[test]
fn every_version_and_length_of_ipv6() {
    let mut bytes = numbered::<64>();
    for first in 0..=u8::MAX {
        bytes[0] = first;
        for payload in (0..=30).chain([255, 256, u16::MAX]) {
            bytes[4..6].copy_from_slice(&payload.to_be_bytes());
            for len in [0, 1, 39, 40, 41, 50, 63, 64] {
                let end = 40 + usize::from(payload);
                let packet = Ipv6Packet::new_checked(&bytes[..len]);
                let expected = (first >> 4 == 6 && end <= len).then(|| &bytes[40..end]);
                let found = packet.ok().map(|packet| packet.payload());
                assert_eq!(found, expected, "{first:#x}, payload {payload}, in {len} bytes");
            }
        }
    }
}

/// Tests option kinds and lengths: options that were parsed are written in a form that parses to the same value.
#[test]
fn every_short_option_sequence() {
    let mut known = 0;
    rows(&[0, 1, 2, 3, 4, 5, 8, 10, 255], 6, |row| {
        let (mut options, mut again, mut bytes) = (TcpOptions::NONE, TcpOptions::NONE, [0; 40]);
        options.read(row);
        known += u32::from(options != again);
        let len = options.write(&mut bytes);
        assert!(len.is_multiple_of(4) && len == options.len());
        again.read(&bytes[..len]);
        assert_eq!(again, options, "{row:?}");
    });
    assert!(known > 1000, "{known} rows have options");
}

/// Tests header numbers and short lengths: the walk must end inside the bytes.
#[test]
fn every_short_chain_of_extensions() {
    let mut ends = 0;
    rows(&[0, 1, 6, 43, 44, 60], 5, |row| {
        // Two headers of 8 bytes, which begin with the bytes of the sequence, and a payload.
        let mut bytes = [0; 20];
        let half = row.len().min(3);
        bytes[..half].copy_from_slice(&row[..half]);
        bytes[8..8 + row.len() - half].copy_from_slice(&row[half..]);
        for first in [0, 6, 43, 44, 60] {
            for len in [0, 1, 7, 8, 9, 15, 16, 20] {
                let Ok(found) = TransportHeader::behind(IpProtocol(first), &bytes[..len]) else { continue };
                assert!(
                    bytes[..len].ends_with(found.payload) && (len - found.payload.len()).is_multiple_of(8)
                );
                let is_part =
                    |part: Fragment| part.offset.is_multiple_of(8) && (part.more || part.offset > 0);
                assert!(found.fragment.is_none_or(is_part));
                ends += 1;
            }
        }
    });
    assert!(ends > 1000, "{ends} chains have an end");
}
