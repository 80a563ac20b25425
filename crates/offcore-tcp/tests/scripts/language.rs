//! Scripts as values, and packets in the notation of scripts.

use std::fmt;

use offcore_wire::TcpFlags;

/// A script: what the host is, and what happens.
#[derive(Debug, Default)]
pub(crate) struct Script {
    pub(crate) setup: Setup,
    pub(crate) lines: Vec<Line>,
}

/// What `option` lines say of the host.
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
    pub(crate) time: Time,
    pub(crate) action: Action,
}

/// When: the first and the last microsecond that is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Time {
    /// After the script's beginning.
    At(u64, u64),
    /// After the event before.
    After(u64, u64),
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

/// What an application does, and what is done to the bed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Listen {
        backlog: usize,
    },
    Connect,
    Accept,
    /// Bytes to write, the number of bytes that fit, and `MSG_MORE`.
    Write(usize, usize, bool),
    /// Bytes at most, how many there are, and whether they are the altered ones.
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
    /// The name of an event, and whether it has come.
    Event(String, bool),
    Engine(Engine),
    /// The peer is at another port from now on.
    Flow(u16),
    /// The next SYN that is sent begins another sequence space.
    Renumber,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// Copies that are ordered are not made.
    Hold,
    /// They are made at once.
    Release,
    /// They fail, and the core makes them.
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
    /// Another field, or a word.
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

/// A segment. Numbers are relative to the sender's and the receiver's first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    /// The two bits of RFC 3168.
    pub(crate) ecn: u8,
    pub(crate) flags: TcpFlags,
    pub(crate) seq: u32,
    pub(crate) len: u32,
    pub(crate) ack: Option<u32>,
    /// As on the wire; none for any.
    pub(crate) window: Option<u16>,
    pub(crate) urgent: u16,
    /// None for any.
    pub(crate) options: Option<Vec<TcpOption>>,
    /// Its payload is not what the stream has there.
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
    /// None for any value.
    Timestamps(Option<u32>, u32),
    Unknown(u8, Vec<u8>),
}

/// An ICMP error about a segment of ours.
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
    /// What RFC 1191 and RFC 8201 have.
    TooBig {
        mtu: u16,
    },
    TimeExceeded,
}

/// The flags that have letters.
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

/// The names of ECN's marks.
pub(crate) const MARKS: [&str; 4] = ["noecn", "ect1", "ect0", "ce"];

impl Segment {
    /// Whether a segment that came is the one that this line expects.
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

/// A time in seconds, as scripts have it.
pub(crate) fn seconds(micros: u64) -> String {
    format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000)
}
