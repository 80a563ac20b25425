//! Parser of testpmd's printed statistics.

use std::str::FromStr;

use anyhow::{Context, Result, bail};

/// A port's statistics (`show port stats`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortStats {
    pub port: u16,
    pub rx_packets: u64,
    /// Packets that arrived without a posted buffer.
    pub rx_missed: u64,
    /// Bytes received, without FCS.
    pub rx_bytes: u64,
    pub rx_errors: u64,
    /// Packets lost because testpmd had no free packet buffer.
    pub rx_no_mbuf: u64,
    pub tx_packets: u64,
    /// Packets that the port failed to send.
    pub tx_errors: u64,
    /// Bytes sent, without FCS.
    pub tx_bytes: u64,
    /// Packets received per second since the previous query (0 for the first query).
    pub rx_pps: u64,
    /// Packets sent per second since the previous query (0 for the first query).
    pub tx_pps: u64,
}

/// Statistics of forwarding since its start (`show fwd stats all`, `stop`).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ForwardStats {
    pub ports: Vec<PortForwardStats>,
    /// Statistics by pair of queues. testpmd prints them only if the number of pairs exceeds the number of ports, and
    /// omits pairs that moved no packet.
    pub streams: Vec<StreamStats>,
    /// The cycles spent, if their recording is enabled and packets were moved.
    pub cycles: Option<CoreCycles>,
}

/// Forwarding statistics of a port.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortForwardStats {
    pub port: u16,
    pub rx_packets: u64,
    /// Packets that the port dropped before forwarding received them.
    pub rx_dropped: u64,
    pub tx_packets: u64,
    /// Packets that forwarding dropped because the port did not accept them.
    pub tx_dropped: u64,
}

/// Forwarding statistics from one queue to another.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StreamStats {
    /// Source port and queue.
    pub rx: (u16, u16),
    /// Destination port and queue.
    pub tx: (u16, u16),
    pub rx_packets: u64,
    pub tx_packets: u64,
    /// Packets dropped because the TX queue did not accept them.
    pub tx_dropped: u64,
}

/// Cycles of forwarding as recorded by testpmd (`record-core-cycles`). It counts the TSC cycles of those iterations of
/// its loop that moved packets, so that empty polls are not included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoreCycles {
    pub per_packet: f64,
    pub total: u64,
    /// Total number of packets: received packets, except in modes that only send.
    pub packets: u64,
    /// The TSC's frequency in MHz.
    pub mhz: u64,
}

impl PortStats {
    /// Parses the answer to `show port stats all`.
    pub(super) fn parse_all(text: &str) -> Result<Vec<Self>> {
        const HEAD: &str = "NIC statistics for port ";
        let mut ports = Vec::new();
        for (at, _) in text.match_indices(HEAD) {
            let section = &text[at..];
            let end = section[HEAD.len()..].find(HEAD).map_or(section.len(), |end| HEAD.len() + end);
            let section = &section[..end];
            ports.push(Self {
                port: number_after(section, HEAD)?,
                rx_packets: number_after(section, "RX-packets:")?,
                rx_missed: number_after(section, "RX-missed:")?,
                rx_bytes: number_after(section, "RX-bytes:")?,
                rx_errors: number_after(section, "RX-errors:")?,
                rx_no_mbuf: number_after(section, "RX-nombuf:")?,
                tx_packets: number_after(section, "TX-packets:")?,
                tx_errors: number_after(section, "TX-errors:")?,
                tx_bytes: number_after(section, "TX-bytes:")?,
                rx_pps: number_after(section, "Rx-pps:")?,
                tx_pps: number_after(section, "Tx-pps:")?,
            });
        }
        if ports.is_empty() {
            bail!("expected {HEAD:?} and the statistics of a port");
        }
        Ok(ports)
    }
}

impl ForwardStats {
    /// Returns the statistics of a port.
    ///
    /// # Errors
    /// If forwarding does not use the port.
    pub fn port(&self, port: u16) -> Result<&PortForwardStats> {
        let found = self.ports.iter().find(|stats| stats.port == port);
        found.with_context(|| format!("testpmd does not forward on port {port}: {self:?}"))
    }

    /// Parses the answer to `show fwd stats all` or `stop`.
    pub(super) fn parse(text: &str) -> Result<Self> {
        const PORT: &str = "Forward statistics for port ";
        const STREAM: &str = "Forward Stats for RX Port=";
        let mut stats = Self::default();
        // Sections begin with a heading between rules and end at the next heading or at a rule.
        let lines: Vec<_> = text.lines().collect();
        for (i, heading) in lines.iter().enumerate() {
            let body = || lines[i + 1..].iter().take_while(|line| !line.contains("---")).copied();
            if heading.contains(PORT) {
                let body = body().collect::<Vec<_>>().join("\n");
                stats.ports.push(PortForwardStats {
                    port: number_after(heading, PORT)?,
                    rx_packets: number_after(&body, "RX-packets:")?,
                    rx_dropped: number_after(&body, "RX-dropped:")?,
                    tx_packets: number_after(&body, "TX-packets:")?,
                    tx_dropped: number_after(&body, "TX-dropped:")?,
                });
            } else if heading.contains(STREAM) {
                let body = body().collect::<Vec<_>>().join("\n");
                let (rx, tx) = heading.split_once("->").context("a stream's heading has \"->\"")?;
                let queue = |side| -> Result<(u16, u16)> {
                    Ok((number_after(side, "Port=")?, number_after(side, "Queue=")?))
                };
                stats.streams.push(StreamStats {
                    rx: queue(rx)?,
                    tx: queue(tx)?,
                    rx_packets: number_after(&body, "RX-packets:")?,
                    tx_packets: number_after(&body, "TX-packets:")?,
                    tx_dropped: number_after(&body, "TX-dropped:")?,
                });
            }
        }
        if stats.ports.is_empty() {
            bail!("expected {PORT:?} and its counts");
        }
        stats.cycles = CoreCycles::parse(text)?;
        Ok(stats)
    }
}

impl CoreCycles {
    /// Parses the line that testpmd adds to forwarding statistics, such as
    /// `CPU cycles/packet=122.57 (total cycles=3841114669 / total rxonly packets=31338784) at 2600 MHz Clock`.
    fn parse(text: &str) -> Result<Option<Self>> {
        const HEAD: &str = "CPU cycles/packet=";
        let Some(line) = text.lines().find(|line| line.contains(HEAD)) else { return Ok(None) };
        Ok(Some(Self {
            per_packet: number_after(line, HEAD)?,
            total: number_after(line, "total cycles=")?,
            packets: number_after(line, " packets=")?,
            mhz: number_after(line, ") at ")?,
        }))
    }
}

/// Parses the number after the first `name` in `text`.
fn number_after<T: FromStr>(text: &str, name: &str) -> Result<T> {
    let (_, rest) = text.split_once(name).with_context(|| format!("expected {name:?} and a number"))?;
    let rest = rest.trim_start();
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    let digits = &rest[..end];
    match digits.parse() {
        Ok(number) => Ok(number),
        Err(_) => bail!("expected a number behind {name:?}, found {:?}", rest.lines().next().unwrap_or("")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT_STATS: &str = "
  ######################## NIC statistics for port 0  ########################
  RX-packets: 25769600   RX-missed: 1          RX-bytes:  1649254400
  RX-errors: 2
  RX-nombuf:  3         
  TX-packets: 4          TX-errors: 5          TX-bytes:  6

  Throughput (since last show)
  Rx-pps:      1234567          Rx-bps:            7
  Tx-pps:            8          Tx-bps:            9
  ############################################################################

  ######################## NIC statistics for port 1  ########################
  RX-packets: 11         RX-missed: 0          RX-bytes:  12
  RX-errors: 0
  RX-nombuf:  0         
  TX-packets: 13         TX-errors: 0          TX-bytes:  14

  Throughput (since last show)
  Rx-pps:            0          Rx-bps:            0
  Tx-pps:            0          Tx-bps:            0
  ############################################################################
";

    const FORWARD_STATS: &str = "Telling cores to stop...
Waiting for lcores to finish...

  ------- Forward Stats for RX Port= 0/Queue= 0 -> TX Port= 0/Queue= 0 -------
  RX-packets: 15669472       TX-packets: 1              TX-dropped: 2             

  ------- Forward Stats for RX Port= 0/Queue= 1 -> TX Port= 0/Queue= 1 -------
  RX-packets: 15669312       TX-packets: 3              TX-dropped: 4             

  ---------------------- Forward statistics for port 0  ----------------------
  RX-packets: 31338784       RX-dropped: 5             RX-total: 31338789
  TX-packets: 4              TX-dropped: 6             TX-total: 10
  ----------------------------------------------------------------------------

  +++++++++++++++ Accumulated forward statistics for all ports+++++++++++++++
  RX-packets: 31338784       RX-dropped: 0             RX-total: 31338784
  TX-packets: 0              TX-dropped: 0             TX-total: 0
  ++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++

  CPU cycles/packet=122.57 (total cycles=3841114669 / total rxonly packets=31338784) at 2600 MHz Clock

Done.
";

    #[test]
    fn port_statistics() {
        let ports = PortStats::parse_all(PORT_STATS).unwrap();
        assert_eq!(ports.len(), 2);
        let first = PortStats {
            port: 0,
            rx_packets: 25_769_600,
            rx_missed: 1,
            rx_bytes: 1_649_254_400,
            rx_errors: 2,
            rx_no_mbuf: 3,
            tx_packets: 4,
            tx_errors: 5,
            tx_bytes: 6,
            rx_pps: 1_234_567,
            tx_pps: 8,
        };
        assert_eq!(ports[0], first);
        assert_eq!((ports[1].port, ports[1].rx_packets, ports[1].tx_bytes), (1, 11, 14));
    }

    #[test]
    fn forwarding_statistics() {
        let stats = ForwardStats::parse(FORWARD_STATS).unwrap();
        let port = stats.port(0).unwrap();
        assert_eq!(
            (port.rx_packets, port.rx_dropped, port.tx_packets, port.tx_dropped),
            (31_338_784, 5, 4, 6)
        );
        assert!(stats.port(1).is_err());
        assert_eq!(stats.streams.len(), 2);
        let second =
            StreamStats { rx: (0, 1), tx: (0, 1), rx_packets: 15_669_312, tx_packets: 3, tx_dropped: 4 };
        assert_eq!(stats.streams[1], second);
        let cycles = CoreCycles { per_packet: 122.57, total: 3_841_114_669, packets: 31_338_784, mhz: 2600 };
        assert_eq!(stats.cycles, Some(cycles));
    }

    #[test]
    fn cycles_are_absent_unless_recorded() {
        let text = FORWARD_STATS.replace("CPU cycles/packet", "something else");
        assert_eq!(ForwardStats::parse(&text).unwrap().cycles, None);
    }

    #[test]
    fn a_damaged_answer_is_refused_by_name() {
        assert!(PortStats::parse_all("nothing").is_err());
        let error = PortStats::parse_all(&PORT_STATS.replace("RX-missed: 1 ", "")).map(|ports| ports.len());
        assert!(format!("{:#}", error.unwrap_err()).contains("RX-missed"));
        let error = ForwardStats::parse("Packet forwarding not started\n").unwrap_err();
        assert!(error.to_string().contains("Forward statistics"));
    }
}
