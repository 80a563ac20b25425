//! Data types for scripts and for the packets in them.

use std::fmt;

use offcore_stats::time::Micros;
use offcore_wire::TcpFlags;

/// A script: the configuration of the host, and the events.
#[derive(Debug, Default)]
pub(crate) struct Script {
    pub(crate) setup: Setup,
    pub(crate) lines: Vec<Line>,
}

/// Settings from `option` lines.
#[derive(Debug, Default)]
pub(crate) struct Setup {
    pub(crate) ipv6: bool,
    pub(crate) newreno: bool,
    pub(crate) no_ecn: bool,
    pub(crate) mtu: Option<u16>,
    pub(crate) receive_window: Option<u32>,
}

/// A line with an event.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) number: usize,
    pub(crate) time: TimeRange,
    pub(crate) action: Action,
}

/// The permitted time range: first and last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimeRange {
    /// Relative to the beginning of the script.
    At(Micros, Micros),
    /// Relative to the previous event.
    After(Micros, Micros),
    Any,
}

#[derive(Debug)]
pub(crate) enum Action {
    Inject(Segment),
    InjectIcmp(Icmp),
    Expect(Segment),
    Call(Call),
    Check(Vec<Comparison>),
}

/// An application's call or a command to the test bed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Listen {
        backlog: usize,
    },
    Connect,
    Accept,
    /// Bytes to write, the number of bytes that fit, and `MSG_MORE`.
    Write(usize, usize, bool),
    /// Maximum number of bytes, the number of available bytes, and whether they are altered.
    Read(usize, usize, bool),
    Close,
    Abort,
    Shutdown,
    NoDelay,
    /// `TCP_USER_TIMEOUT` in milliseconds, and `TCP_SYNCNT`.
    UserTimeout(usize),
    SynCount(usize),
    /// `TCP_CORK`.
    Cork(bool),
    /// The name of an event, and whether it is expected to have occurred.
    Event(String, bool),
    Engine(Engine),
    /// Selects another port of the peer from now on.
    Flow(u16),
    /// The next sent SYN starts a new sequence space.
    Renumber,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// Submitted copies are not made.
    Hold,
    /// Copies are made at once.
    Release,
    /// Copies fail, and the core makes them.
    Fail,
}

/// `field operator value`.
#[derive(Debug)]
pub(crate) struct Comparison {
    pub(crate) field: String,
    pub(crate) operator: String,
    pub(crate) value: Value,
}

#[derive(Debug)]
pub(crate) enum Value {
    Number(i64),
    Segments(i64),
    /// Another field or a constant.
    Word(String),
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ", self.field, self.operator)?;
        match &self.value {
            Value::Number(number) => write!(f, "{number}"),
            Value::Segments(number) => write!(f, "{number} mss"),
            Value::Word(word) => f.write_str(word),
        }
    }
}

/// A segment. Sequence numbers are relative to the initial sequence numbers of both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    /// The two ECN bits of RFC 3168.
    pub(crate) ecn: u8,
    pub(crate) flags: TcpFlags,
    pub(crate) seq: u32,
    pub(crate) len: u32,
    pub(crate) ack: Option<u32>,
    /// The value on the wire. `None` matches any value.
    pub(crate) window: Option<u16>,
    pub(crate) urgent: u16,
    /// `None` matches any options.
    pub(crate) options: Option<Vec<TcpOption>>,
    /// The payload differs from the stream.
    pub(crate) altered: bool,
    pub(crate) bad_checksum: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TcpOption {
    End,
    Nop,
    Mss(u16),
    Scale(u8),
    SackPermitted,
    Sack(Vec<(u32, u32)>),
    /// `None` matches any value.
    Timestamps(Option<u32>, u32),
    Unknown(u8, Vec<u8>),
}

/// An ICMP error about a segment from the host under test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Icmp {
    pub(crate) kind: IcmpKind,
    pub(crate) seq: u32,
    pub(crate) len: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IcmpKind {
    Unreachable {
        v4: u8,
        v6: u8,
    },
    /// Fragmentation Needed (RFC 1191) or Packet Too Big (RFC 8201).
    TooBig {
        mtu: u16,
    },
    TimeExceeded,
}

/// TCP flags and their letters.
pub(crate) const FLAGS: [(char, TcpFlags); 8] = [
    ('S', TcpFlags::SYN),
    ('F', TcpFlags::FIN),
    ('P', TcpFlags::PSH),
    ('R', TcpFlags::RST),
    ('E', TcpFlags::ECE),
    ('W', TcpFlags::CWR),
    ('U', TcpFlags::URG),
    ('.', TcpFlags::ACK),
];

/// Names of the ECN codepoints.
pub(crate) const MARKS: [&str; 4] = ["noecn", "ect1", "ect0", "ce"];

impl Segment {
    /// Returns whether a received segment matches this expected segment.
    pub(crate) fn admits(&self, came: &Self) -> bool {
        let options = match (&self.options, &came.options) {
            (Some(wanted), Some(came)) => {
                wanted.len() == came.len()
                    && wanted.iter().zip(came).all(|(wanted, came)| wanted.admits(came))
            }
            _ => true,
        };
        let window = self.window.is_none() || self.window == came.window;
        let same = (self.ecn, self.flags, self.seq, self.len, self.ack, self.urgent)
            == (came.ecn, came.flags, came.seq, came.len, came.ack, came.urgent);
        same && options && window
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ecn != 0 {
            write!(f, "[{}] ", MARKS[usize::from(self.ecn & 3)])?;
        }
        if self.flags.is_empty() {
            f.write_str("-")?;
        }
        for (letter, flag) in FLAGS {
            if self.flags.contains(flag) {
                write!(f, "{letter}")?;
            }
        }
        write!(f, " {}:{}({})", self.seq, self.seq.wrapping_add(self.len), self.len)?;
        if let Some(ack) = self.ack {
            write!(f, " ack {ack}")?;
        }
        match self.window {
            Some(window) => write!(f, " win {window}")?,
            None => f.write_str(" win *")?,
        }
        if self.urgent > 0 {
            write!(f, " urg {}", self.urgent)?;
        }
        match &self.options {
            None => f.write_str(" <...>"),
            Some(options) if options.is_empty() => Ok(()),
            Some(options) => {
                let texts: Vec<String> = options.iter().map(TcpOption::to_string).collect();
                write!(f, " <{}>", texts.join(","))
            }
        }
    }
}

impl TcpOption {
    fn admits(&self, came: &Self) -> bool {
        match (self, came) {
            (Self::Timestamps(None, echo), Self::Timestamps(_, came)) => echo == came,
            _ => self == came,
        }
    }
}

impl fmt::Display for TcpOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::End => f.write_str("eol"),
            Self::Nop => f.write_str("nop"),
            Self::Mss(mss) => write!(f, "mss {mss}"),
            Self::Scale(scale) => write!(f, "wscale {scale}"),
            Self::SackPermitted => f.write_str("sackOK"),
            Self::Sack(blocks) => {
                f.write_str("sack")?;
                blocks.iter().try_for_each(|(start, end)| write!(f, " {start}:{end}"))
            }
            Self::Timestamps(Some(value), echo) => write!(f, "TS val {value} ecr {echo}"),
            Self::Timestamps(None, echo) => write!(f, "TS val * ecr {echo}"),
            Self::Unknown(kind, value) => write!(f, "option {kind} {value:02x?}"),
        }
    }
}

/// Formats a time in seconds, as scripts write it.
pub(crate) fn seconds(time: Micros) -> String {
    format!("{}.{:06}", time.as_secs(), time.get() % 1_000_000)
}
