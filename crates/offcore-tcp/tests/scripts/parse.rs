//! Parses scripts, one event per line.
//!
//! The parser is hand-written because a line is just a list of words. A grammar for a parser crate would be longer, and
//! error messages can name the wrong word.

use offcore_stats::time::Micros;

use crate::language::{
    Action, Call, Comparison, Engine, FLAGS, Icmp, IcmpKind, Line, MARKS, Script, Segment, Setup, TcpOption,
    TimeRange, Value,
};

type Parsed<T> = Result<T, String>;

/// The remaining words of a line.
struct Words<'a>(&'a str);

impl<'a> Words<'a> {
    fn next(&mut self) -> Option<&'a str> {
        let rest = self.0.trim_start();
        let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
        let (word, rest) = rest.split_at(end);
        self.0 = rest.trim_start();
        (!word.is_empty()).then_some(word)
    }

    fn want(&mut self, what: &str) -> Parsed<&'a str> {
        self.next().ok_or(format!("expected {what}, found the end of the line"))
    }

    fn number<T: std::str::FromStr>(&mut self, what: &str) -> Parsed<T> {
        let word = self.want(what)?;
        number(word, what)
    }

    /// Skips the next word if it is `word`.
    fn skip(&mut self, word: &str) -> bool {
        let before = self.0;
        let is = self.next() == Some(word);
        if !is {
            self.0 = before;
        }
        is
    }

    fn keyword(&mut self, word: &str) -> Parsed<()> {
        if self.skip(word) { Ok(()) } else { Err(format!("'{}': expected '{word}'", self.0)) }
    }

    fn end(&self) -> Parsed<()> {
        if self.0.is_empty() { Ok(()) } else { Err(format!("'{}': expected the end of the line", self.0)) }
    }
}

fn number<T: std::str::FromStr>(word: &str, what: &str) -> Parsed<T> {
    word.parse().map_err(|_| format!("'{word}': expected {what}"))
}

/// Parses a script. Error messages begin with the line number.
pub(crate) fn script(text: &str) -> Parsed<Script> {
    let mut script = Script::default();
    for (index, line) in text.lines().enumerate() {
        let line = line.split_once("//").map_or(line, |(event, _)| event).trim();
        let mut words = Words(line);
        let number = index + 1;
        let done = if line.is_empty() {
            Ok(())
        } else if words.skip("option") {
            option(&mut script.setup, &mut words)
        } else {
            event(&mut words).map(|(time, action)| script.lines.push(Line { number, time, action }))
        };
        done.map_err(|error| format!("{number}: {error}"))?;
    }
    Ok(script)
}

fn option(setup: &mut Setup, words: &mut Words<'_>) -> Parsed<()> {
    match words.want("an option")? {
        "ipv6" => setup.ipv6 = true,
        "newreno" => setup.newreno = true,
        "no_ecn" => setup.no_ecn = true,
        "mtu" => setup.mtu = Some(words.number("bytes")?),
        "receive_window" => setup.receive_window = Some(words.number("bytes")?),
        other => return Err(format!("'{other}': expected ipv6, newreno, no_ecn, mtu or receive_window")),
    }
    words.end()
}

fn event(words: &mut Words<'_>) -> Parsed<(TimeRange, Action)> {
    let time = time(words.want("a time")?)?;
    let rest = words.0;
    let action = match words.want("an event")? {
        "<" if words.skip("icmp") => Action::InjectIcmp(icmp(words)?),
        "<" => Action::Inject(segment(words)?),
        ">" => Action::Expect(segment(words)?),
        "%{" => {
            let inner = rest.strip_prefix("%{").and_then(|rest| rest.strip_suffix("}%"));
            words.0 = "";
            Action::Check(comparisons(inner.ok_or("expected '}%' at the end of the line")?)?)
        }
        name => Action::Call(call(name, words)?),
    };
    words.end()?;
    Ok((time, action))
}

/// `0`, `+0`, `+.1`, `+0~+.02`, `*`.
fn time(word: &str) -> Parsed<TimeRange> {
    if word == "*" {
        return Ok(TimeRange::Any);
    }
    let (from, to) = word.split_once('~').unwrap_or((word, word));
    let (first, last) = (micros(from)?, micros(to)?);
    Ok(if from.starts_with('+') { TimeRange::After(first, last) } else { TimeRange::At(first, last) })
}

fn micros(word: &str) -> Parsed<Micros> {
    let wrong = || format!("'{word}': expected a time in seconds, like 1.5 or +.04");
    let (whole, part) =
        word.trim_start_matches('+').split_once('.').unwrap_or((word.trim_start_matches('+'), ""));
    if part.len() > 6 || whole.is_empty() && part.is_empty() {
        return Err(wrong());
    }
    let read = |digits: &str| digits.parse::<u64>().map_err(|_| wrong());
    Ok(Micros::from_secs(read(&format!("0{whole}"))?) + Micros::new(read(&format!("{part:0<6}"))?))
}

fn segment(words: &mut Words<'_>) -> Parsed<Segment> {
    let mut word = words.want("flags")?;
    let mut ecn = 0;
    if let Some(mark) = word.strip_prefix('[').and_then(|mark| mark.strip_suffix(']')) {
        let known = MARKS.iter().position(|known| *known == mark);
        ecn = known.ok_or(format!("'{mark}': expected one of {MARKS:?}"))? as u8;
        word = words.want("flags")?;
    }
    let mut flags = offcore_wire::TcpFlags(0);
    for letter in word.chars().filter(|letter| *letter != '-') {
        let known = FLAGS.iter().find(|flag| flag.0 == letter);
        flags = flags | known.ok_or(format!("'{letter}': expected flags of SFPREWU. or -"))?.1;
    }
    let (seq, len) = range(words.want("seq:end(len)")?)?;
    let ack = if words.skip("ack") { Some(sequence(words.want("a number")?)?) } else { None };
    if ack.is_some() != flags.contains(offcore_wire::TcpFlags::ACK) {
        return Err("'.' and 'ack' go together".into());
    }
    if !words.skip("win") {
        return Err(format!("'{}': expected 'win N' or 'win *'", words.0));
    }
    let window = if words.skip("*") { None } else { Some(words.number("a window or *")?) };
    let urgent = if words.skip("urg") { words.number("an urgent pointer")? } else { 0 };
    let mut options = Some(Vec::new());
    if let Some(rest) = words.0.strip_prefix('<') {
        let (inner, rest) = rest.split_once('>').ok_or("expected '>' behind the options")?;
        words.0 = rest.trim_start();
        options = if inner == "..." { None } else { Some(tcp_options(inner)?) };
    }
    let altered = words.skip("altered");
    let bad_checksum = words.skip("bad_checksum");
    Ok(Segment { ecn, flags, seq, len, ack, window, urgent, options, altered, bad_checksum })
}

/// Parses a sequence number. It may precede the initial one.
fn sequence(word: &str) -> Parsed<u32> {
    number::<i64>(word, "a sequence number").map(|number| number as u32)
}

fn edges(word: &str) -> Parsed<(u32, u32)> {
    let (start, end) = word.split_once(':').ok_or(format!("'{word}': expected start:end"))?;
    Ok((sequence(start)?, sequence(end)?))
}

/// `1:1001(1000)`.
fn range(word: &str) -> Parsed<(u32, u32)> {
    let split = word.strip_suffix(')').and_then(|word| word.split_once('('));
    let (both, len) = split.ok_or(format!("'{word}': expected seq:end(len)"))?;
    let ((start, end), len) = (edges(both)?, number::<u32>(len, "a length")?);
    if end.wrapping_sub(start) != len {
        return Err(format!("'{word}': {start} and {len} make {}", start.wrapping_add(len)));
    }
    Ok((start, len))
}

fn tcp_options(inner: &str) -> Parsed<Vec<TcpOption>> {
    let mut options = Vec::new();
    for item in inner.split(',') {
        let mut words = Words(item.trim());
        options.push(match words.want("an option")? {
            "eol" => TcpOption::End,
            "nop" => TcpOption::Nop,
            "mss" => TcpOption::Mss(words.number("bytes")?),
            "wscale" => TcpOption::Scale(words.number("bits")?),
            "sackOK" => TcpOption::SackPermitted,
            "TS" => {
                words.keyword("val")?;
                let value = if words.skip("*") { None } else { Some(words.number("a timestamp or *")?) };
                words.keyword("ecr")?;
                TcpOption::Timestamps(value, words.number("a timestamp")?)
            }
            "sack" => {
                let mut blocks = Vec::new();
                while let Some(word) = words.next() {
                    blocks.push(edges(word)?);
                }
                TcpOption::Sack(blocks)
            }
            "unknown" => TcpOption::Unknown(words.number("a kind")?, Vec::new()),
            other => return Err(format!("'{other}': expected a TCP option")),
        });
        words.end()?;
    }
    Ok(options)
}

/// `unreachable port [1:1001(1000)]`, `unreachable frag_needed mtu 1200 [...]`, `too_big mtu 1280 [...]`.
fn icmp(words: &mut Words<'_>) -> Parsed<Icmp> {
    let kind = match words.want("a message")? {
        "unreachable" => match words.want("a code")? {
            "net" => IcmpKind::Unreachable { v4: 0, v6: 0 },
            "host" => IcmpKind::Unreachable { v4: 1, v6: 3 },
            "protocol" => IcmpKind::Unreachable { v4: 2, v6: 0 },
            "port" => IcmpKind::Unreachable { v4: 3, v6: 4 },
            "admin" => IcmpKind::Unreachable { v4: 13, v6: 1 },
            "frag_needed" => mtu(words)?,
            other => {
                return Err(format!("'{other}': expected net, host, protocol, port, admin or frag_needed"));
            }
        },
        "too_big" => mtu(words)?,
        "time_exceeded" => IcmpKind::TimeExceeded,
        other => return Err(format!("'{other}': expected unreachable, too_big or time_exceeded")),
    };
    let quoted = words.want("[seq:end(len)]")?;
    let inner = quoted.strip_prefix('[').and_then(|word| word.strip_suffix(']'));
    let (seq, len) = range(inner.ok_or(format!("'{quoted}': expected [seq:end(len)]"))?)?;
    Ok(Icmp { kind, seq, len })
}

fn mtu(words: &mut Words<'_>) -> Parsed<IcmpKind> {
    words.keyword("mtu")?;
    Ok(IcmpKind::TooBig { mtu: words.number("bytes")? })
}

fn call(name: &str, words: &mut Words<'_>) -> Parsed<Call> {
    let (name, argument) = match name.strip_suffix(')').and_then(|name| name.split_once('(')) {
        Some((name, argument)) => (name, Some(number::<usize>(argument, "a number")?)),
        None => (name, None),
    };
    let wanted = || argument.ok_or(format!("expected {name}(BYTES)"));
    let result = if words.skip("=") { Some(words.number("a number of bytes")?) } else { None };
    Ok(match name {
        "listen" => Call::Listen { backlog: argument.unwrap_or(16) },
        "connect" => Call::Connect,
        "accept" => Call::Accept,
        "write" => Call::Write(wanted()?, result.map_or_else(wanted, Ok)?, words.skip("more")),
        "read" => Call::Read(wanted()?, result.ok_or("expected read(BYTES) = BYTES")?, words.skip("altered")),
        "close" => Call::Close,
        "abort" => Call::Abort,
        "shutdown" => Call::Shutdown,
        "nodelay" => Call::NoDelay,
        "user_timeout" => Call::UserTimeout(wanted()?),
        "syncnt" => Call::SynCount(wanted()?),
        "cork" => Call::Cork(true),
        "uncork" => Call::Cork(false),
        "expect" => {
            let comes = !words.skip("no");
            Call::Event(words.want("an event")?.into(), comes)
        }
        "engine" => Call::Engine(match words.want("hold, release or fail")? {
            "hold" => Engine::Hold,
            "release" => Engine::Release,
            "fail" => Engine::Fail,
            other => return Err(format!("'{other}': expected hold, release or fail")),
        }),
        "flow" => Call::Flow(words.number("a number")?),
        "renumber" => Call::Renumber,
        other => return Err(format!("'{other}': expected <, >, %{{ or a call")),
    })
}

/// Parses `field operator value`, separated by commas.
fn comparisons(inner: &str) -> Parsed<Vec<Comparison>> {
    inner.split(',').map(|text| comparison(&mut Words(text.trim()))).collect()
}

fn comparison(words: &mut Words<'_>) -> Parsed<Comparison> {
    let field = words.want("a field")?.into();
    let operator = words.want("an operator")?;
    if !["==", "!=", "<", "<=", ">", ">="].contains(&operator) {
        return Err(format!("'{operator}': expected ==, !=, <, <=, > or >="));
    }
    let word = words.want("a value")?;
    let value = match (word.parse::<i64>(), words.next()) {
        (Ok(number), None | Some("us")) => Value::Number(number),
        (Ok(number), Some("ms")) => Value::Number(number * 1000),
        (Ok(number), Some("s")) => Value::Number(number * 1_000_000),
        (Ok(number), Some("mss")) => Value::Segments(number),
        (Err(_), None) => Value::Word(word.into()),
        (_, Some(unit)) => return Err(format!("'{unit}': expected us, ms, s or mss")),
    };
    words.end()?;
    Ok(Comparison { field, operator: operator.into(), value })
}
