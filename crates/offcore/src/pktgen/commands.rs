//! Commands that are read while packets are sent.

use std::io::BufRead;
use std::sync::mpsc::{Receiver, channel};

use offcore_flow::pktgen::rate::Rate;
use offcore_flow::pktgen::sizes::Sizes;

pub(super) const HELP: &str = "\
commands: start, stop, stats, clear, help, quit,
          set rate RATE, set size SIZES, set flows N, set burst N, set count N";

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Command {
    Burst(u32),
    Clear,
    Count(u64),
    Flows(u32),
    Help,
    Quit,
    Rate(Rate),
    Sizes(Sizes),
    Start,
    Stats,
    Stop,
}

/// Input from the user or script.
#[derive(Debug)]
pub(super) enum ParsedCommand {
    /// A command, or the reason why a line is invalid.
    Line(Result<Command, String>),
    /// The end of the input.
    End,
}

/// Reads standard input on a separate thread, which ends with the input or with the process.
pub(super) fn read() -> std::io::Result<Receiver<ParsedCommand>> {
    let (said, commands) = channel();
    std::thread::Builder::new().name("commands".into()).spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            let line = line.trim();
            if !line.is_empty()
                && !line.starts_with('#')
                && said.send(ParsedCommand::Line(parse(line))).is_err()
            {
                return;
            }
        }
        // Fails if the run is over.
        let _ = said.send(ParsedCommand::End);
    })?;
    Ok(commands)
}

fn parse(line: &str) -> Result<Command, String> {
    let number = |text: &str, most: u64| {
        let found = text.parse().ok().filter(|number| (1..=most).contains(number));
        found.ok_or_else(|| format!("'{text}': expected a number from 1 to {most}"))
    };
    let words: Vec<_> = line.split_whitespace().collect();
    Ok(match words[..] {
        ["start"] => Command::Start,
        ["stop"] => Command::Stop,
        ["stats"] => Command::Stats,
        ["clear"] => Command::Clear,
        ["help" | "?"] => Command::Help,
        ["quit" | "exit"] => Command::Quit,
        ["set", "rate", rate] => Command::Rate(rate.parse()?),
        ["set", "rate", rate, unit] => Command::Rate(format!("{rate}{unit}").parse()?),
        ["set", "size", sizes] => Command::Sizes(sizes.parse()?),
        ["set", "flows", flows] => Command::Flows(number(flows, 1 << 16)? as u32),
        ["set", "burst", burst] => Command::Burst(number(burst, 1 << 16)? as u32),
        ["set", "count", count] => Command::Count(number(count, u64::MAX)?),
        _ => return Err(format!("'{line}' is no command\n{HELP}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_read() {
        for (line, command) in [
            ("start", Command::Start),
            ("stop", Command::Stop),
            ("set rate 1M", Command::Rate(Rate::Packets(1e6))),
            ("set rate 2G bps", Command::Rate(Rate::Bits(2e9))),
            ("set  size imix", Command::Sizes("imix".parse().unwrap())),
            ("set flows 8", Command::Flows(8)),
            ("set burst 16", Command::Burst(16)),
            ("set count 5", Command::Count(5)),
            ("stats", Command::Stats),
            ("clear", Command::Clear),
            ("help", Command::Help),
            ("quit", Command::Quit),
        ] {
            assert_eq!(parse(line), Ok(command), "{line}");
        }
    }

    #[test]
    fn unknown_command_lists_commands() {
        for (line, says) in [
            ("begin", "set rate RATE"),
            ("set", "set rate RATE"),
            ("set speed 1", "set rate RATE"),
            ("set rate fast", "no rate"),
            ("set size 1", "64 to 65535"),
            ("set flows 0", "1 to 65536"),
            ("set flows 65537", "1 to 65536"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
