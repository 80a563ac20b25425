use proptest::prelude::*;

use super::*;

/// A file format with a byte order and a unit of time. Files are written field by field as the specification describes
/// them.
#[derive(Debug, Clone, Copy)]
struct Format {
    big: bool,
    nanoseconds: bool,
}

impl Format {
    const LITTLE_NANOS: Self = Self { big: false, nanoseconds: true };

    fn u32(self, value: u32) -> [u8; 4] {
        if self.big { value.to_be_bytes() } else { value.to_le_bytes() }
    }

    fn u16(self, value: u16) -> [u8; 2] {
        if self.big { value.to_be_bytes() } else { value.to_le_bytes() }
    }

    fn header(self, version: (u16, u16), snaplen: u32, linktype: u32) -> Vec<u8> {
        let magic = if self.nanoseconds { 0xa1b2_3c4d } else { 0xa1b2_c3d4 };
        let mut file = Vec::new();
        file.extend(self.u32(magic));
        file.extend(self.u16(version.0));
        file.extend(self.u16(version.1));
        for field in [0, 0, snaplen, linktype] {
            file.extend(self.u32(field));
        }
        file
    }

    fn record(
        self,
        seconds: u32,
        fraction: u32,
        captured_len: u32,
        original_len: u32,
        data: &[u8],
    ) -> Vec<u8> {
        let mut record = Vec::new();
        for field in [seconds, fraction, captured_len, original_len] {
            record.extend(self.u32(field));
        }
        record.extend(data);
        record
    }

    fn file(self, records: &[Vec<u8>]) -> Vec<u8> {
        [self.header((2, 4), 65_535, 1), records.concat()].concat()
    }
}

fn opened(file: &[u8]) -> PcapReader<&[u8]> {
    PcapReader::new(file).unwrap()
}

fn refusal(file: &[u8]) -> String {
    PcapReader::new(file).unwrap_err().to_string()
}

/// A reader that returns single bytes and interruptions.
#[derive(Debug)]
struct Trickle<'a> {
    rest: &'a [u8],
    interrupt: bool,
}

impl Read for Trickle<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.interrupt = !self.interrupt;
        if self.interrupt {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let len = buffer.len().min(1);
        self.rest.read(&mut buffer[..len])
    }
}

#[test]
fn tcpdump_files_are_read() {
    // Two packets of 60 and 61 bytes, at 1700000000.123456789 s and one second later.
    let micros = include_bytes!("tcpdump-micros.pcap");
    let nanos = include_bytes!("tcpdump-nanos.pcap");
    for (file, first_ns) in [(&micros[..], 1_700_000_000_123_456_000), (nanos, 1_700_000_000_123_456_789)] {
        let mut reader = opened(file);
        let mut buffer = [0; 100];
        let record = reader.next_record(&mut buffer).unwrap().unwrap();
        assert_eq!(record, PcapRecord { timestamp_ns: first_ns, len: 60, original_len: 60 });
        assert_eq!(crate::probe::check_content(&buffer[..60]), Ok(()));
        let record = reader.next_record(&mut buffer).unwrap().unwrap();
        assert_eq!(
            record,
            PcapRecord { timestamp_ns: first_ns + NANOS_PER_SECOND, len: 61, original_len: 61 }
        );
        assert_eq!(crate::probe::check_header(&buffer[..61]).unwrap().sequence, 2);
        assert_eq!(reader.next_record(&mut buffer).unwrap(), None);
    }
}

#[test]
fn writer_output_matches_tcpdump() {
    let expected = include_bytes!("tcpdump-nanos.pcap");
    let mut reader = opened(expected);
    let snaplen = u32::from_le_bytes([expected[16], expected[17], expected[18], expected[19]]);
    let mut writer = PcapWriter::new(Vec::new(), snaplen).unwrap();
    let mut buffer = [0; 100];
    while let Some(record) = reader.next_record(&mut buffer).unwrap() {
        writer.write_record(record.timestamp_ns, &buffer[..record.len]).unwrap();
    }
    writer.flush().unwrap();
    assert_eq!(writer.into_inner(), expected);
}

#[test]
fn non_pcap_files_are_rejected() {
    assert_eq!(refusal(b""), "not a pcap file: it has fewer than 4 bytes");
    assert_eq!(refusal(b"\x7fEL"), "not a pcap file: it has fewer than 4 bytes");
    assert_eq!(refusal(b"\x7fELF\x02\x01"), "not a pcap file: it begins with bytes 7f 45 4c 46");
    assert_eq!(
        refusal(b"\x0a\x0d\x0d\x0a\x1c\x00\x00\x00"),
        "the file is in pcapng format, expected pcap; convert it with 'editcap -F pcap IN OUT'"
    );
    let format = Format::LITTLE_NANOS;
    let header = format.header((2, 4), 65_535, 1);
    assert_eq!(
        refusal(&header[..23]),
        "pcap file ends within its header: 23 bytes, expected 24; capture it again"
    );
    for (linktype, name) in
        [(113, "113 (Linux cooked: 'tcpdump -i any')"), (101, "101 (raw IP)"), (147, "147,")]
    {
        let text = refusal(&format.header((2, 4), 65_535, linktype));
        assert!(text.contains(&format!("has link type {name}")), "{text}");
        assert!(text.contains("expected 1 (Ethernet)") && text.contains("tcprewrite --dlt=enet"), "{text}");
    }
    assert!(refusal(&format.header((2, 3), 65_535, 1)).contains("version 2.3, expected 2.4"));
    assert!(refusal(&format.header((2, 4), 65_535, 0x2400_0001)).contains("sequence of 4 bytes"));
    assert!(PcapReader::new(&format.header((2, 4), 65_535, 0x0400_0001)[..]).is_ok(), "no FCS, said aloud");
}

#[test]
fn truncated_file_reports_position() {
    let format = Format::LITTLE_NANOS;
    let records = [format.record(1, 2, 3, 3, b"abc"), format.record(1, 2, 5, 5, b"defgh")];
    let file = format.file(&records);
    let (second, end) = (24 + 16 + 3, file.len());
    let mut buffer = [0; 16];
    for cut in 24..=end {
        let mut reader = opened(&file[..cut]);
        let mut whole = 0;
        let error = loop {
            match reader.next_record(&mut buffer) {
                Ok(Some(_)) => whole += 1,
                Ok(None) => break None,
                Err(error) => break Some(error.to_string()),
            }
        };
        let expected = match cut {
            24 => (0, None),
            25..40 => (0, Some(format!("record 1: {} bytes, expected 16", cut - 24))),
            40..43 => (0, Some(format!("record 1: {} bytes, expected 3", cut - 40))),
            43 => (1, None),
            _ if cut < second + 16 => (1, Some(format!("record 2: {} bytes, expected 16", cut - second))),
            _ if cut < end => (1, Some(format!("record 2: {} bytes, expected 5", cut - second - 16))),
            _ => (2, None),
        };
        let error = error.map(|e| e.strip_prefix("pcap file ends within ").unwrap().to_owned());
        assert_eq!((whole, error), expected, "cut at {cut}");
    }
}

#[test]
fn record_above_limit_is_rejected() {
    let format = Format::LITTLE_NANOS;
    let mut buffer = vec![0; 300_000];
    for (snaplen, len) in [(0, 262_145), (u32::MAX, u32::MAX), (0, u32::MAX), (1500, 262_145)] {
        let file =
            [format.header((2, 4), snaplen, 1), format.record(0, 0, len, len, &vec![0; 1000])].concat();
        let error = opened(&file).next_record(&mut buffer).unwrap_err();
        let PcapError::RecordTooLong { record: 1, found } = error else { panic!("unexpected {error:?}") };
        assert_eq!(found, len);
    }
}

#[test]
fn records_may_exceed_snapshot_length() {
    let (format, mut buffer) = (Format::LITTLE_NANOS, [0; 2000]);
    for snaplen in [0, 1, 70, 96, 1500] {
        let records = [2000, 71, 1501].map(|len| format.record(0, 0, len, len, &vec![7; len as usize]));
        let file = [format.header((2, 4), snaplen, 1), records.concat()].concat();
        let mut reader = opened(&file);
        let found: Vec<usize> = std::iter::from_fn(|| reader.next_record(&mut buffer).unwrap())
            .map(|record| record.len)
            .collect();
        assert_eq!(found, [2000, 71, 1501]);
    }
}

/// Such files come from Linux distributions of the 1990s, and from devices that still use that libpcap.
#[test]
fn modified_record_headers_are_read() {
    for big in [false, true] {
        let format = Format { big, nanoseconds: false };
        let mut file = format.header((2, 4), 96, 1);
        let magic = 0xa1b2_cd34u32;
        file[..4].copy_from_slice(&if big { magic.to_be_bytes() } else { magic.to_le_bytes() });
        for (micros, packet) in [(5, &b"first"[..]), (7, b"second one")] {
            let len = packet.len() as u32;
            let record = format.record(1, micros, len, len + 2, packet);
            let (header, packet) = record.split_at(16);
            file.extend([header, &[2, 0, 0, 0, 8, 0, 4, 0], packet].concat());
        }
        let (mut reader, mut buffer) = (opened(&file), [0; 96]);
        for (nanos, packet) in [(5000, &b"first"[..]), (7000, b"second one")] {
            let record = reader.next_record(&mut buffer).unwrap().unwrap();
            let (len, original_len) = (packet.len(), packet.len() as u32 + 2);
            assert_eq!(record, PcapRecord { timestamp_ns: NANOS_PER_SECOND + nanos, len, original_len });
            assert_eq!(&buffer[..len], packet);
        }
        assert_eq!(reader.next_record(&mut buffer).unwrap(), None);
        let error = opened(&file[..24 + 20]).next_record(&mut buffer).unwrap_err();
        assert_eq!(error.to_string(), "pcap file ends within record 1: 20 bytes, expected 24");
    }
}

#[test]
fn record_larger_than_buffer_is_skipped() {
    let format = Format::LITTLE_NANOS;
    let records = [format.record(0, 0, 9, 9, b"too large"), format.record(0, 0, 3, 3, b"fit")];
    let file = format.file(&records);
    let mut reader = opened(&file);
    let mut buffer = [0; 4];
    let error = reader.next_record(&mut buffer).unwrap_err();
    assert_eq!(error.to_string(), "record 1 has 9 bytes, more than a packet buffer holds (4)");
    assert_eq!(reader.next_record(&mut buffer).unwrap().unwrap().len, 3);
    assert_eq!(buffer, *b"fit\0");
    // A skipped record counts.
    let mut reader = opened(&file[..file.len() - 1]);
    assert!(reader.next_record(&mut buffer).is_err());
    let error = reader.next_record(&mut buffer).unwrap_err();
    assert_eq!(error.to_string(), "pcap file ends within record 2: 2 bytes, expected 3");
    // The file ends before the skipped packet does.
    let mut reader = opened(&file[..24 + 16 + 8]);
    let error = reader.next_record(&mut buffer).unwrap_err();
    assert_eq!(error.to_string(), "pcap file ends within record 1: 8 bytes, expected 9");
}

#[test]
fn packet_is_read_in_parts() {
    let format = Format::LITTLE_NANOS;
    let records = [format.record(0, 0, 9, 9, b"too large"), format.record(0, 0, 3, 8, b"fit")];
    let file = format.file(&records);
    let mut reader = opened(&file);
    assert_eq!(reader.next_header().unwrap().unwrap().len, 9);
    let mut parts = [[0; 4]; 2];
    for part in &mut parts {
        reader.read_packet(part).unwrap();
    }
    assert_eq!(parts.concat(), *b"too larg");
    let record = reader.next_header().unwrap().unwrap();
    assert_eq!((record.len, record.original_len), (3, 8));
    // Unread data is skipped.
    assert_eq!(reader.next_header().unwrap(), None);

    // A part that exceeds the packet does not get the bytes behind it.
    let mut reader = opened(&file);
    reader.next_header().unwrap().unwrap();
    assert!(matches!(reader.read_packet(&mut [0; 10]), Err(PcapError::TruncatedRecord { record: 1, .. })));
    // A part that exceeds the file fails, too, and so does skipping.
    for read in [true, false] {
        let mut reader = opened(&file[..24 + 16 + 8]);
        reader.next_header().unwrap().unwrap();
        let error = if read { reader.read_packet(&mut [0; 9]).err() } else { reader.next_header().err() };
        let text = error.unwrap().to_string();
        assert_eq!(text, "pcap file ends within record 1: 8 bytes, expected 9");
    }
}

#[test]
fn parts_are_written_as_one_packet() {
    let parts = [&b"abc"[..], b"", b"defg", b"hi"];
    for snaplen in 1..12u32 {
        let (mut whole, mut pieces) =
            (PcapWriter::new(Vec::new(), snaplen).unwrap(), PcapWriter::new(Vec::new(), snaplen).unwrap());
        whole.write_record(5, b"abcdefghi").unwrap();
        pieces.write_parts(5, 9, parts).unwrap();
        assert_eq!(whole.into_inner(), pieces.into_inner(), "cut to {snaplen}");
    }
}

#[test]
fn io_errors_are_propagated() {
    #[derive(Debug)]
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("disk on fire"))
        }
    }
    let error = PcapReader::new(Broken).unwrap_err();
    assert_eq!(std::error::Error::source(&error).unwrap().to_string(), "disk on fire");
    let full = PcapWriter::new(&mut [0u8; 30][..], 100).unwrap().write_record(0, b"abc");
    assert!(matches!(full, Err(PcapError::Io(_))));
}

#[test]
fn writer_rejects_out_of_range_values() {
    for snaplen in [0, MAX_RECORD_LEN + 1, u32::MAX] {
        assert!(
            matches!(PcapWriter::new(Vec::new(), snaplen), Err(PcapError::SnapLen { found }) if found == snaplen)
        );
    }
    let mut writer = PcapWriter::new(Vec::new(), 96).unwrap();
    let last = (u64::from(u32::MAX) + 1) * NANOS_PER_SECOND - 1;
    assert!(writer.write_record(last, b"").is_ok());
    assert!(matches!(writer.write_record(last + 1, b""), Err(PcapError::Timestamp { .. })));
    let mut buffer = [0; 96];
    let file = writer.into_inner();
    assert_eq!(opened(&file).next_record(&mut buffer).unwrap().unwrap().timestamp_ns, last);
}

proptest! {
    #[test]
    fn written_packets_are_read_back(
        packets in prop::collection::vec((any::<u32>(), 0..1_000_000_000u32, prop::collection::vec(any::<u8>(), 0..200)), 0..10),
        snaplen in 1..250u32,
    ) {
        let mut writer = PcapWriter::new(Vec::new(), snaplen).unwrap();
        for (seconds, nanos, packet) in &packets {
            let timestamp_ns = u64::from(*seconds) * NANOS_PER_SECOND + u64::from(*nanos);
            writer.write_record(timestamp_ns, packet).unwrap();
        }
        let file = writer.into_inner();
        let mut reader = PcapReader::new(Trickle { rest: &file, interrupt: false }).unwrap();
        let mut buffer = [0; 250];
        for (seconds, nanos, packet) in &packets {
            let record = reader.next_record(&mut buffer).unwrap().unwrap();
            let len = packet.len().min(snaplen as usize);
            prop_assert_eq!(record.timestamp_ns, u64::from(*seconds) * NANOS_PER_SECOND + u64::from(*nanos));
            prop_assert_eq!(record.original_len as usize, packet.len());
            prop_assert_eq!(&buffer[..record.len], &packet[..len]);
        }
        prop_assert_eq!(reader.next_record(&mut buffer).unwrap(), None);
    }

    #[test]
    fn byte_orders_and_units_read_alike(
        big: bool,
        nanoseconds: bool,
        seconds: u32,
        micros in 0..1_000_000u32,
        packet in prop::collection::vec(any::<u8>(), 0..100),
        cut in 0..100u32,
    ) {
        let format = Format { big, nanoseconds };
        let fraction = if nanoseconds { micros * 1000 } else { micros };
        let len = packet.len() as u32;
        let file = format.file(&[format.record(seconds, fraction, len, len + cut, &packet)]);
        let mut buffer = [0; 100];
        let record = opened(&file).next_record(&mut buffer).unwrap().unwrap();
        let timestamp_ns = u64::from(seconds) * NANOS_PER_SECOND + u64::from(micros) * 1000;
        prop_assert_eq!(record, PcapRecord { timestamp_ns, len: packet.len(), original_len: len + cut });
        prop_assert_eq!(&buffer[..packet.len()], &packet[..]);
    }
}
