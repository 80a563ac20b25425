//! Capture files in the classic pcap format (draft-ietf-opsawg-pcap), Ethernet only.
//!
//! The reader accepts files of tcpdump and similar tools: both byte orders, microseconds or nanoseconds, and the longer
//! record headers of Kuznetzov's libpcap. The writer uses little-endian nanoseconds. Both process packet by packet in
//! the caller's memory and make two calls to the file for each packet, so the file should be buffered
//! ([`std::io::BufReader`], [`std::io::BufWriter`]).

use std::io::{self, Read, Write};

use crate::field::{bytes, put};

/// `LINKTYPE_ETHERNET`, the link type of the packets in a file.
pub const LINKTYPE_ETHERNET: u32 = 1;

/// Maximum length of a packet in bytes, which is libpcap's own limit. The snapshot length of a file is not a limit,
/// because capture cards, mergers and scripts write longer records; Wireshark reads them, too.
pub const MAX_RECORD_LEN: u32 = 262_144;

/// Length of the file header in bytes.
pub const FILE_HEADER_LEN: usize = 24;
/// Length of a record header in bytes.
const RECORD_HEADER_LEN: usize = 16;
/// Length of a record header in a file of Kuznetzov's libpcap, which adds an interface index, a protocol and a packet
/// type.
const MODIFIED_RECORD_HEADER_LEN: usize = 24;
const VERSION: (u16, u16) = (2, 4);
const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// The first four bytes, read in the byte order of the file.
mod magic {
    pub(super) const MICROSECONDS: u32 = 0xa1b2_c3d4;
    pub(super) const NANOSECONDS: u32 = 0xa1b2_3c4d;
    /// Kuznetzov's libpcap, with microseconds.
    pub(super) const MODIFIED: u32 = 0xa1b2_cd34;
    /// The block type at the beginning of a pcapng file. It is the same in both byte orders.
    pub(super) const PCAPNG: u32 = 0x0a0d_0d0a;
}

/// Offsets in the file header.
mod file {
    pub(super) const MAGIC: usize = 0;
    pub(super) const MAJOR: usize = 4;
    pub(super) const MINOR: usize = 6;
    pub(super) const SNAPLEN: usize = 16;
    pub(super) const LINKTYPE: usize = 20;
}

/// Offsets in the header of a record.
mod record {
    pub(super) const SECONDS: usize = 0;
    pub(super) const FRACTION: usize = 4;
    pub(super) const CAPTURED_LEN: usize = 8;
    pub(super) const ORIGINAL_LEN: usize = 12;
}

/// A packet of a file. Its bytes are in the buffer that the caller passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PcapRecord {
    /// Capture time in nanoseconds since 1970.
    pub timestamp_ns: u64,
    /// Number of captured bytes, from the start of the buffer on.
    pub len: usize,
    /// Length on the wire. It is more than `len` if the capture truncated the packet.
    pub original_len: u32,
}

/// Reads the packets of a file sequentially.
#[derive(Debug)]
pub struct PcapReader<R> {
    input: R,
    order: Order,
    /// Nanoseconds per unit of the fraction field.
    unit_ns: u64,
    /// Length of a record header in bytes.
    record_header_len: usize,
    /// Number of records begun so far.
    records: u64,
    /// Number of captured bytes of the present packet.
    len: usize,
    /// Number of bytes of the present packet that were not read yet.
    left: usize,
}

impl<R: Read> PcapReader<R> {
    /// Reads the file header.
    ///
    /// # Errors
    /// [`PcapError`] describes the format of the file, if it is not a pcap file of Ethernet packets.
    pub fn new(mut input: R) -> Result<Self, PcapError> {
        let mut header = [0; FILE_HEADER_LEN];
        let found = read_up_to(&mut input, &mut header)?;
        let (order, unit_ns, record_header_len) = recognise(&header, found)?;
        if found < FILE_HEADER_LEN {
            return Err(PcapError::TruncatedHeader { found });
        }
        let version = (order.u16(&header, file::MAJOR), order.u16(&header, file::MINOR));
        if version != VERSION {
            return Err(PcapError::Version { major: version.0, minor: version.1 });
        }
        // The upper bits contain the length of a frame check sequence, if one follows each packet.
        let linktype = order.u32(&header, file::LINKTYPE);
        let fcs_words = linktype >> 28;
        if linktype & 0x0400_0000 != 0 && fcs_words != 0 {
            return Err(PcapError::FrameCheckSequence { len: fcs_words * 2 });
        }
        if linktype & 0x03ff_ffff != LINKTYPE_ETHERNET {
            let found = linktype & 0x03ff_ffff;
            return Err(PcapError::LinkType { found, name: linktype_name(found) });
        }
        Ok(Self { input, order, unit_ns, record_header_len, records: 0, len: 0, left: 0 })
    }

    /// Returns the length of the file's record headers.
    pub fn record_header_len(&self) -> usize {
        self.record_header_len
    }

    /// Returns the number of unread bytes of the present packet.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Returns the input. Its position is at the next record, or at the packet data if the record header was read.
    pub fn input(&mut self) -> &mut R {
        &mut self.input
    }

    /// Reads the next packet to the start of `buffer`. Returns `None` at the end of the file.
    ///
    /// # Errors
    /// [`PcapError::BufferTooSmall`] if the packet does not fit. It was skipped then, and the next call reads the next
    /// packet. [`PcapError::TruncatedRecord`], [`PcapError::RecordTooLong`] and [`PcapError::Io`] end the file.
    #[inline]
    pub fn next_record(&mut self, buffer: &mut [u8]) -> Result<Option<PcapRecord>, PcapError> {
        let Some(record) = self.next_header()? else { return Ok(None) };
        let found = buffer.len();
        let Some(packet) = buffer.get_mut(..record.len) else {
            self.pass_over()?;
            return Err(PcapError::BufferTooSmall { record: self.records, found, expected: record.len });
        };
        self.read_packet(packet)?;
        Ok(Some(record))
    }

    /// Reads the next record header, for callers that then allocate memory and read the packet with
    /// [`PcapReader::read_packet`]. Returns `None` at the end of the file. Unread bytes of the previous packet are
    /// skipped.
    ///
    /// # Errors
    /// The same as for [`PcapReader::next_record`], except for [`PcapError::BufferTooSmall`].
    #[inline]
    pub fn next_header(&mut self) -> Result<Option<PcapRecord>, PcapError> {
        if self.left > 0 {
            self.pass_over()?;
        }
        let mut header = [0; MODIFIED_RECORD_HEADER_LEN];
        let expected = self.record_header_len;
        let found = read_up_to(&mut self.input, header.get_mut(..expected).unwrap_or_default())?;
        if found == 0 {
            return Ok(None);
        }
        self.records += 1;
        let record = self.records;
        if found < expected {
            return Err(PcapError::TruncatedRecord { record, found, expected });
        }
        let captured_len = self.order.u32(&header, record::CAPTURED_LEN);
        if captured_len > MAX_RECORD_LEN {
            return Err(PcapError::RecordTooLong { record, found: captured_len });
        }
        (self.len, self.left) = (captured_len as usize, captured_len as usize);
        let seconds = u64::from(self.order.u32(&header, record::SECONDS));
        let fraction = u64::from(self.order.u32(&header, record::FRACTION));
        Ok(Some(PcapRecord {
            timestamp_ns: seconds * NANOS_PER_SECOND + fraction * self.unit_ns,
            len: self.len,
            original_len: self.order.u32(&header, record::ORIGINAL_LEN),
        }))
    }

    /// Fills `part` with the next bytes of the present packet. A packet may be read in several parts.
    ///
    /// # Errors
    /// [`PcapError::TruncatedRecord`] if the file or the packet ends before `part` is full, and [`PcapError::Io`].
    #[inline]
    pub fn read_packet(&mut self, part: &mut [u8]) -> Result<(), PcapError> {
        let most = part.len().min(self.left);
        let wanted = part.len();
        let found = read_up_to(&mut self.input, part.get_mut(..most).unwrap_or_default())?;
        self.left -= found;
        if found < wanted {
            return Err(self.truncated());
        }
        Ok(())
    }

    /// Skips the rest of a packet.
    #[cold]
    fn pass_over(&mut self) -> Result<(), PcapError> {
        let passed = io::copy(&mut (&mut self.input).take(self.left as u64), &mut io::sink())?;
        self.left = self.left.saturating_sub(usize::try_from(passed).unwrap_or(usize::MAX));
        if self.left > 0 {
            return Err(self.truncated());
        }
        Ok(())
    }

    #[cold]
    fn truncated(&mut self) -> PcapError {
        let found = self.len - std::mem::take(&mut self.left);
        PcapError::TruncatedRecord { record: self.records, found, expected: self.len }
    }
}

/// Writes packets to a file sequentially.
#[derive(Debug)]
pub struct PcapWriter<W> {
    output: W,
    snaplen: u32,
}

impl<W: Write> PcapWriter<W> {
    /// Writes the file header. Packets longer than `snaplen` bytes are truncated.
    ///
    /// # Errors
    /// [`PcapError::Io`], and [`PcapError::SnapLen`] unless `snaplen` is 1 to [`MAX_RECORD_LEN`].
    pub fn new(mut output: W, snaplen: u32) -> Result<Self, PcapError> {
        if !(1..=MAX_RECORD_LEN).contains(&snaplen) {
            return Err(PcapError::SnapLen { found: snaplen });
        }
        let mut header = [0; FILE_HEADER_LEN];
        put(&mut header, file::MAGIC, magic::NANOSECONDS.to_le_bytes());
        put(&mut header, file::MAJOR, VERSION.0.to_le_bytes());
        put(&mut header, file::MINOR, VERSION.1.to_le_bytes());
        put(&mut header, file::SNAPLEN, snaplen.to_le_bytes());
        put(&mut header, file::LINKTYPE, LINKTYPE_ETHERNET.to_le_bytes());
        output.write_all(&header)?;
        Ok(Self { output, snaplen })
    }

    /// Writes a packet that was captured at `timestamp_ns` nanoseconds since 1970.
    ///
    /// # Errors
    /// [`PcapError::Io`], and [`PcapError::Timestamp`] after the year 2106.
    #[inline]
    pub fn write_record(&mut self, timestamp_ns: u64, packet: &[u8]) -> Result<(), PcapError> {
        self.write_parts(timestamp_ns, packet.len(), [packet])
    }

    /// Writes a packet of `len` bytes, which consists of `parts` in order.
    ///
    /// # Errors
    /// The same as for [`PcapWriter::write_record`].
    #[inline]
    pub fn write_parts<'a>(
        &mut self,
        timestamp_ns: u64,
        len: usize,
        parts: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<(), PcapError> {
        let seconds = u32::try_from(timestamp_ns / NANOS_PER_SECOND)
            .map_err(|_| PcapError::Timestamp { found: timestamp_ns })?;
        #[allow(clippy::cast_possible_truncation, reason = "a remainder of 10^9 fits")]
        let fraction = (timestamp_ns % NANOS_PER_SECOND) as u32;
        let original_len = u32::try_from(len).unwrap_or(u32::MAX);
        let captured_len = original_len.min(self.snaplen);
        let mut header = [0; RECORD_HEADER_LEN];
        put(&mut header, record::SECONDS, seconds.to_le_bytes());
        put(&mut header, record::FRACTION, fraction.to_le_bytes());
        put(&mut header, record::CAPTURED_LEN, captured_len.to_le_bytes());
        put(&mut header, record::ORIGINAL_LEN, original_len.to_le_bytes());
        self.output.write_all(&header)?;
        let mut left = captured_len as usize;
        for part in parts {
            let part = part.get(..left).unwrap_or(part);
            self.output.write_all(part)?;
            left -= part.len();
        }
        Ok(())
    }

    /// Writes buffered data to the file.
    ///
    /// # Errors
    /// [`PcapError::Io`].
    pub fn flush(&mut self) -> Result<(), PcapError> {
        Ok(self.output.flush()?)
    }

    /// Returns the output.
    pub fn output(&mut self) -> &mut W {
        &mut self.output
    }

    /// Returns the output, for example to close the file and check for errors.
    pub fn into_inner(self) -> W {
        self.output
    }
}

/// The byte order of a file.
#[derive(Debug, Clone, Copy)]
enum Order {
    Big,
    Little,
}

impl Order {
    #[inline]
    fn u16<const LEN: usize>(self, header: &[u8; LEN], at: usize) -> u16 {
        match self {
            Self::Big => u16::from_be_bytes(bytes(header, at)),
            Self::Little => u16::from_le_bytes(bytes(header, at)),
        }
    }

    #[inline]
    fn u32<const LEN: usize>(self, header: &[u8; LEN], at: usize) -> u32 {
        match self {
            Self::Big => u32::from_be_bytes(bytes(header, at)),
            Self::Little => u32::from_le_bytes(bytes(header, at)),
        }
    }
}

/// Returns the byte order, the nanoseconds per unit of time, and the length of a record header. Only `found` bytes of
/// `header` are valid.
fn recognise(header: &[u8; FILE_HEADER_LEN], found: usize) -> Result<(Order, u64, usize), PcapError> {
    if found < 4 {
        return Err(PcapError::Empty);
    }
    for order in [Order::Little, Order::Big] {
        match order.u32(header, file::MAGIC) {
            magic::MICROSECONDS => return Ok((order, 1000, RECORD_HEADER_LEN)),
            magic::NANOSECONDS => return Ok((order, 1, RECORD_HEADER_LEN)),
            magic::MODIFIED => return Ok((order, 1000, MODIFIED_RECORD_HEADER_LEN)),
            magic::PCAPNG => return Err(PcapError::PcapNg),
            _ => {}
        }
    }
    let [a, b, c, d] = bytes(header, file::MAGIC);
    Err(PcapError::NotPcap { found: format!("{a:02x} {b:02x} {c:02x} {d:02x}") })
}

/// Reads until `buffer` is full or the input ends. Returns the number of bytes.
#[inline]
fn read_up_to(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// An error in a capture file. Records are counted from 1, times are nanoseconds since 1970.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum PcapError {
    /// record {record} has {expected} bytes, more than a packet buffer holds ({found})
    BufferTooSmall { record: u64, found: usize, expected: usize },
    /// each packet of the pcap file ends in a frame check sequence of {len} bytes; expected none, cut it off with
    /// 'editcap -F pcap -C -{len} IN OUT'
    FrameCheckSequence { len: u32 },
    /// pcap file cannot be read or written
    Io(#[from] io::Error),
    /// pcap file has link type {found}{name}, expected {LINKTYPE_ETHERNET:?} (Ethernet): capture on one Ethernet
    /// interface ('tcpdump -i eth0'), or convert it with 'tcprewrite --dlt=enet'
    LinkType { found: u32, name: &'static str },
    /// not a pcap file: it has fewer than 4 bytes
    Empty,
    /// not a pcap file: it begins with bytes {found}
    NotPcap { found: String },
    /// the file is in pcapng format, expected pcap; convert it with 'editcap -F pcap IN OUT'
    PcapNg,
    /// record {record} of the pcap file has a length of {found} bytes, expected at most {MAX_RECORD_LEN:?}: the file is damaged
    RecordTooLong { record: u64, found: u32 },
    /// snapshot length {found} is out of range; choose 1 to {MAX_RECORD_LEN:?}
    SnapLen { found: u32 },
    /// time {found} ns is after 2106, which a pcap file cannot say
    Timestamp { found: u64 },
    /// pcap file ends within its header: {found} bytes, expected {FILE_HEADER_LEN:?}; capture it again
    TruncatedHeader { found: usize },
    /// pcap file ends within record {record}: {found} bytes, expected {expected}
    TruncatedRecord { record: u64, found: usize, expected: usize },
    /// pcap file has version {major}.{minor}, expected 2.4; convert it with 'editcap -F pcap IN OUT'
    Version { major: u16, minor: u16 },
}

/// Returns the name of a common link type in parentheses (tcpdump.org/linktypes.html).
fn linktype_name(linktype: u32) -> &'static str {
    match linktype {
        0 => " (BSD loopback)",
        101 => " (raw IP)",
        105 => " (802.11)",
        113 => " (Linux cooked: 'tcpdump -i any')",
        127 => " (802.11 with radiotap)",
        228 => " (raw IPv4)",
        229 => " (raw IPv6)",
        276 => " (Linux cooked v2: 'tcpdump -i any')",
        _ => "",
    }
}

#[cfg(test)]
mod tests;
