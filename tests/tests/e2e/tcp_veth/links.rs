//! Connections continue after the interface below the port was down, or was deleted and created again.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;

use peers::one_core;

use crate::switch::wait_for_status;
use crate::tcp::{OURS, connect, content, stop};

use super::{NEEDS, PORT, Veth};

/// More than the initial size of the kernel's send buffer, so that some bytes are written only after the link has
/// recovered.
const LEN: usize = 3_000_000;

/// Sends bytes and compares the echo. `meanwhile` runs while they are in flight.
fn exchange(streams: &[TcpStream], seed: u64, meanwhile: impl FnOnce()) {
    thread::scope(|scope| {
        for mut stream in streams {
            let bytes = content(seed, LEN);
            scope.spawn({
                let bytes = bytes.clone();
                move || stream.write_all(&bytes).unwrap()
            });
            scope.spawn(move || {
                let mut back = vec![0; LEN];
                stream.read_exact(&mut back).unwrap();
                assert!(back == bytes, "{:?}: other bytes came back", stream.peer_addr());
            });
        }
        meanwhile();
    });
}

fn survives(port: &str) {
    let veth = Veth::new(1500);
    veth.set_offloads(1, false);
    let mut offcore = veth.host(port, &["--idle", "sleep"]);
    let streams = veth.kernel.within(|| Ok(OURS.map(|address| connect(address, 7)))).unwrap();
    exchange(&streams, 1, || {});

    veth.ours.ip(&["link", "set", PORT, "down"]).unwrap();
    wait_for_status(&mut offcore, 0, "is down");
    exchange(&streams, 2, || {
        veth.ours.ip(&["link", "set", PORT, "up"]).unwrap();
        wait_for_status(&mut offcore, 0, "is up");
    });

    veth.ours.ip(&["link", "delete", PORT]).unwrap();
    wait_for_status(&mut offcore, 0, "is gone");
    exchange(&streams, 3, || {
        veth.connect(1500);
        veth.set_offloads(1, false);
        wait_for_status(&mut offcore, 0, "is up");
    });

    for mut stream in streams {
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
    }
    let finished = stop(offcore);
    let tcp = &finished.lines.iter().rev().find_map(|line| line.json.as_ref()).unwrap()["tcp"][0];
    assert_eq!((&tcp["accepted"], &tcp["finished"]), (&2.into(), &2.into()), "{port}: {tcp}");
}

#[test]
fn connections_outlive_their_link() {
    let Some(_core) = one_core(&NEEDS) else { return };
    thread::scope(|scope| {
        for port in ["af_packet:p0", "af_xdp:p0"] {
            scope.spawn(move || survives(port));
        }
    });
}
