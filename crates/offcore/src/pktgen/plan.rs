//! Converts flags to a generator's configuration and rejects contradictions.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use offcore_flow::pktgen::rate::Rate;
use offcore_flow::pktgen::replay::Capture;
use offcore_flow::pktgen::sizes::{MIN_SIZE, Sizes};
use offcore_flow::pktgen::{Payload, PktgenConfig, Settings};
use offcore_port::Port;
use offcore_port::spec::PortSpec;
use offcore_stats::lcore;
use offcore_wire::traffic::{HeaderTemplate, Traffic, Transport, Vary};

use super::args::{Field, PktgenArgs, Proto};
use crate::args::Lcores;
use crate::args::flags::by_flag;
use crate::failure::Failure;
use crate::output::say;

/// The discard port.
const DISCARD: u16 = 9;
/// Test addresses of RFC 2544 and RFC 5180.
const V4: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 18, 0, 2)];
const V6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 1), Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 2)];

/// Checks everything that can be checked before ports are opened.
pub(super) fn check(args: &PktgenArgs) -> Result<(), String> {
    match args.at.ports.len() {
        1 if args.bidirectional => return Err("--bidirectional needs two ports: give --port twice".into()),
        1 | 2 => {}
        n => return Err(format!("--port: found {n} ports, expected one whose packets return, or two")),
    }
    if let Some(port) = args.at.ports.iter().find(|port| matches!(port.bare(), PortSpec::Gen(_))) {
        return Err(format!(
            "--port {port}: pktgen generates packets itself: expected the port that sends them"
        ));
    }
    if let [one, other] = &args.at.ports[..]
        && one.to_string() == other.to_string()
    {
        return Err(format!("--port {one} is given twice: expected it once if its packets return"));
    }
    if args.rfc2544 && matches!(args.rate, Some(Rate::Bits(_) | Rate::Percent(_) | Rate::Wire(_))) {
        return Err("--rfc2544 searches in packets per second: give --rate in this unit, or remove it".into());
    }
    if args.burst > 1 && matches!(args.rate, None | Some(Rate::Unlimited)) && !args.rfc2544 {
        return Err("--burst is a number of packets that are due together at a rate: give --rate, too".into());
    }
    Ok(())
}

pub(super) fn capture(args: &PktgenArgs) -> Result<Option<Capture>, Failure> {
    let Some(path) = &args.pcap else { return Ok(None) };
    let capture = Capture::read(path).map_err(anyhow::Error::new)?;
    if capture.cut() > 0 {
        say(&format!(
            "warning: '{}' has only the beginning of {} of its {} packets, which is sent instead of them",
            path.display(),
            capture.cut(),
            capture.packets()
        ));
    }
    Ok(Some(capture))
}

/// Returns the configuration. `speed` is the link speed in bit/s, if the interface reports it.
pub(super) fn config(
    args: &PktgenArgs,
    capture: Option<Capture>,
    ports: &[Box<dyn Port>],
    speed: Option<f64>,
) -> Result<PktgenConfig, String> {
    let rate = args.rate.unwrap_or(Rate::Unlimited).on(args.link.or(speed)).map_err(by_flag)?;
    let payload = match capture {
        Some(capture) => {
            let own_time = matches!(rate, Rate::Unlimited);
            let speed = args.speed.unwrap_or(if own_time && args.rate.is_some() { 1e6 } else { 1.0 });
            Payload::Captured { capture, repeat: args.repeat, speed }
        }
        None => Payload::Made(templates(args, ports)?),
    };
    let config = PktgenConfig {
        payload,
        bidirectional: args.bidirectional,
        settings: Settings {
            running: false,
            rate,
            sizes: Sizes::fixed(MIN_SIZE).map_err(by_flag)?,
            flows: args.flows.unwrap_or(1) as u32,
            burst: args.burst as u32,
            count: args.count,
            start: 0,
        },
        verify: args.verify as u32,
        seed: args.seed,
        lcores: match &args.run.lcores {
            Some(Lcores(list)) => list.clone(),
            None => lcore::available()
                .map_err(|error| format!("--lcores: {error}"))?
                .into_iter()
                .take(2)
                .collect(),
        },
    };
    let sizes = match &args.size {
        Some(sizes) => sizes.clone(),
        None => Sizes::fixed(config.min_size().max(MIN_SIZE)).map_err(by_flag)?,
    };
    if let Some(&small) = args.frame.iter().find(|&&size| size < config.min_size()) {
        let min = config.min_size();
        return Err(format!("--frame {small}: these headers, a number and the FCS take {min} bytes"));
    }
    let settings = Settings { sizes, ..config.settings };
    Ok(PktgenConfig { settings, ..config })
}

fn templates(args: &PktgenArgs, ports: &[Box<dyn Port>]) -> Result<Vec<HeaderTemplate>, String> {
    let [src_ip, dst_ip] = match (args.src_ip, args.dst_ip) {
        (Some(src), Some(dst)) => [src, dst],
        (None, Some(IpAddr::V6(dst))) => [V6[0].into(), dst.into()],
        (Some(IpAddr::V6(src)), None) => [src.into(), V6[1].into()],
        (src, dst) => [src.unwrap_or(V4[0].into()), dst.unwrap_or(V4[1].into())],
    };
    let varies = |field: Field| match args.vary[..] {
        [] => matches!(field, Field::SrcIp | Field::SrcPort),
        _ => args.vary.contains(&field),
    };
    let traffic = Traffic {
        src_mac: args.src_mac.unwrap_or(ports[0].mac()),
        dst_mac: args.dst_mac.unwrap_or(ports[ports.len() - 1].mac()),
        vlan: args.vlan.map(|id| id as u16),
        src_ip,
        dst_ip,
        transport: if args.proto == Some(Proto::Tcp) { Transport::Tcp } else { Transport::Udp },
        src_port: args.src_port.unwrap_or(DISCARD),
        dst_port: args.dst_port.unwrap_or(DISCARD),
        vary: Vary {
            src_ip: varies(Field::SrcIp),
            dst_ip: varies(Field::DstIp),
            src_port: varies(Field::SrcPort),
            dst_port: varies(Field::DstPort),
        },
    };
    // The other port is the other end of the same flows.
    let back = Traffic {
        src_mac: traffic.dst_mac,
        dst_mac: traffic.src_mac,
        src_ip: traffic.dst_ip,
        dst_ip: traffic.src_ip,
        src_port: traffic.dst_port,
        dst_port: traffic.src_port,
        vary: Vary {
            src_ip: traffic.vary.dst_ip,
            dst_ip: traffic.vary.src_ip,
            src_port: traffic.vary.dst_port,
            dst_port: traffic.vary.src_port,
        },
        ..traffic.clone()
    };
    let templates = [traffic, back].iter().map(HeaderTemplate::new).collect::<Result<_, _>>();
    templates.map_err(|error| format!("--src-ip and --dst-ip: {error}"))
}

#[cfg(test)]
mod tests {
    use offcore_port::pcap::PcapPort;

    use super::*;
    use crate::cli::Command;
    use crate::cli::lines::{command, examples};
    use crate::pktgen::EXAMPLES;

    fn parsed(words: &[&str]) -> Result<PktgenArgs, String> {
        match command(&format!("offcore pktgen {}", words.join(" ")))? {
            Command::Pktgen(args) => Ok(*args),
            other => panic!("{other:?} is no pktgen"),
        }
    }

    /// Returns the configuration with unconnected ports.
    fn planned(words: &[&str]) -> Result<PktgenConfig, String> {
        let args = parsed(words)?;
        check(&args)?;
        let nowhere = |_: &PortSpec| -> Box<dyn Port> {
            let Ok(PortSpec::Pcap(spec)) = "pcap:-,/dev/null".parse() else { panic!("a port of no files") };
            Box::new(PcapPort::open(&spec).unwrap())
        };
        config(&args, None, &args.at.ports.iter().map(nowhere).collect::<Vec<_>>(), None)
    }

    #[test]
    fn flags_become_a_configuration() {
        let config = planned(&[
            "--port=tap:a",
            "--port=tap:b",
            "--bidirectional",
            "--rate=2Gbps",
            "--size=imix",
            "--flows=8",
            "--burst=16",
            "--count=5",
            "--verify=64",
        ])
        .unwrap();
        let Settings { running, rate, sizes, flows, burst, count, .. } = &config.settings;
        assert_eq!((*running, *rate, sizes.to_string().as_str()), (false, Rate::Bits(2e9), "imix"));
        assert_eq!((*flows, *burst, *count, config.verify), (8, 16, Some(5), 64));
        assert_eq!(config.min_size(), 64);
        let Payload::Made(templates) = &config.payload else { panic!("no capture was named") };
        assert_eq!(templates.len(), 2);
        let config = planned(&["--port=tap:a", "--dst-ip=2001:db8::1", "--proto=tcp", "--vlan=7"]).unwrap();
        // Headers of 14 + 4 + 40 + 20 bytes, the probe's 18 bytes, and 4 bytes of FCS.
        assert_eq!((config.min_size(), config.settings.sizes.to_string().as_str()), (100, "100"));
    }

    #[test]
    fn contradictions_name_the_flags() {
        for (words, says) in [
            (&["--port=tap:a", "--bidirectional"][..], "--bidirectional needs two ports"),
            (&["--port=tap:a", "--port=tap:b", "--port=tap:c"], "found 3 ports"),
            (&["--port=gen:"], "generates packets itself"),
            (&["--port=tap:a", "--port=tap:a"], "given twice"),
            (&["--port=tap:a", "--src-ip=10.0.0.1", "--dst-ip=::1"], "--src-ip and --dst-ip"),
            (&["--port=tap:a", "--rate=50%"], "--link"),
            (&["--port=tap:a", "--burst=16"], "give --rate"),
            (&["--port=tap:a", "--rfc2544", "--rate=1Gbps"], "packets per second"),
            (&["--port=tap:a", "--rfc2544", "--proto=tcp", "--frame=64"], "take 76 bytes"),
            (&["--port=tap:a", "--rfc2544", "--size=64"], "cannot be used with"),
            (&["--port=tap:a", "--pcap=x", "--flows=2"], "cannot be used with"),
            (&["--port=tap:a", "--pcap=x", "--speed=2", "--rate=1k"], "cannot be used with"),
            (&["--port=tap:a", "--speed=2"], "--pcap"),
            (&["--port=tap:a", "--loop"], "--pcap"),
            (&["--port=tap:a", "--loss=1"], "--rfc2544"),
            (&["--port=tap:a", "--speed=2", "--flows=2"], "cannot be used with"),
            (&["--port=tap:a", "--loop", "--rfc2544"], "cannot be used with"),
            (&["--port=tap:a", "--loss=1", "--count=5"], "cannot be used with"),
            (&["--port=tap:a", "--frame=64", "--size=64"], "cannot be used with"),
            (&["--port=tap:a", "--no-start", "--no-interactive"], "cannot be used with"),
            (&["--port=tap:a", "--size=63"], "64 to 65535"),
            (&["--port=tap:a", "--rate=fast"], "no rate"),
            (&["--port=tap:a", "--loss=100", "--rfc2544"], "less than 100"),
            (&["--port=tap:a", "--link=fast"], "10Gbps"),
            (&["--port=tap:a", "--count=0"], "1 or more"),
            (&[], "--port"),
        ] {
            let error = planned(words).map(drop).unwrap_err();
            assert!(error.contains(says), "{words:?}: {error}");
        }
    }

    #[test]
    fn examples_in_help_are_parsed() {
        for line in examples(EXAMPLES, 5) {
            let Ok(Command::Pktgen(args)) = command(&line) else { panic!("{line} is no pktgen") };
            check(&args).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }
}
