//! Guests against testpmd's back end, and without one.

use super::*;
use crate::{Need, NetVhost, Netns, TempDir, Testpmd, TestpmdConfig, exclusive, require};

#[test]
fn qemu_arguments_of_an_interface() {
    let nic = Nic::new("/x/s", "52:54:00:00:00:02", "10.77.0.2/24");
    let [(_, chardev), (_, netdev), (_, device)] = nic.arguments(1);
    assert_eq!(chardev, "socket,id=c1,path=/x/s,reconnect=1");
    assert_eq!(netdev, "vhost-user,id=n1,chardev=c1,queues=1");
    assert!(device.starts_with(
        "virtio-net-pci,netdev=n1,mac=52:54:00:00:00:02,romfile=,vectors=0,mrg_rxbuf=on,packed=off,csum=off,"
    ));
    let nic = Nic {
        server: true,
        queues: 2,
        queue_size: Some(1024),
        packed: true,
        mrg_rxbuf: false,
        offloads: true,
        extra: "indirect_desc=off".into(),
        ..nic
    };
    let [(_, chardev), (_, netdev), (_, device)] = nic.arguments(0);
    assert_eq!(chardev, "socket,id=c0,path=/x/s,server=on");
    assert!(netdev.ends_with("queues=2"));
    assert!(
        device.ends_with(
            ",mrg_rxbuf=off,packed=on,mq=on,rx_queue_size=1024,tx_queue_size=1024,indirect_desc=off"
        )
    );
}

#[test]
fn guest_boots_and_reboots() {
    let Some(()) = require(&[Need::Guest]) else { return };
    let _cores = exclusive();
    let mut guest = Guest::boot(&GuestConfig::default()).unwrap();
    assert_eq!(guest.run("echo hello").unwrap(), Output { status: 0, text: "hello\n".into() });
    // No newline at the end, standard error, a status, and characters that are special to a shell or a console.
    let odd = guest.run(r#"printf 'a\\b "%s" \t' 'it is' >&2; exit 7"#).unwrap();
    assert_eq!(odd, Output { status: 7, text: "a\\b \"it is\" \t".into() });
    assert_eq!(guest.check("cat; echo done").unwrap(), "done\n", "a command does not read the console");
    let long = format!("echo {} | wc -c", "x".repeat(3900));
    assert_eq!(guest.check(&long).unwrap().trim(), "3901");
    assert_eq!(guest.check("seq 5000").unwrap().lines().count(), 5000);
    assert!(guest.check("ls /nonexistent").unwrap_err().to_string().contains("No such file"));
    assert!(guest.run("echo a\necho b").is_err());

    guest.check("touch /tmp/before").unwrap();
    guest.reboot().unwrap();
    assert_eq!(guest.run("test -e /tmp/before").unwrap().status, 1, "memory was kept: it did not reboot");
    assert_eq!(guest.check("echo again").unwrap(), "again\n");

    guest.start_iperf3_server().unwrap();
    let report = guest.check("iperf3 -c 127.0.0.1 -n 1M").unwrap();
    assert!(report.contains("receiver"), "{report}");

    let proc = PathBuf::from(format!("/proc/{}", guest.id()));
    assert!(proc.exists());
    drop(guest);
    assert!(!proc.exists());
}

#[test]
fn guest_kernel_panic_is_an_error() {
    let Some(()) = require(&[Need::Guest]) else { return };
    let _cores = exclusive();
    let mut guest = Guest::boot(&GuestConfig::default()).unwrap();
    guest.check("dmesg -n 8").unwrap();
    let error = guest.run("echo c >/proc/sysrq-trigger; sleep 10").unwrap_err().to_string();
    assert!(error.contains("panicked"), "{error}");
}

#[test]
fn qemu_refusal_is_explained() {
    let Some(()) = require(&[Need::Guest]) else { return };
    let config = GuestConfig { args: vec!["-no-such-option".into()], ..GuestConfig::default() };
    let error = Guest::boot(&config).unwrap_err().to_string();
    assert!(error.contains("no-such-option") && error.contains("invalid option"), "{error}");
}

/// Requirements of tests between a guest and a namespace.
const NEEDS: [Need; 6] = [Need::Root, Need::Guest, Need::Testpmd, Need::Tun, Need::Ping, Need::Ethtool];

/// Starts a back end on core 0, between the guest's socket and a TAP interface in a namespace.
fn vhost_and_tap(netns: &Netns, back_end: &NetVhost) -> Testpmd {
    let mut config = TestpmdConfig::net_vhost(0, back_end);
    config.vdevs.push("net_tap0,iface=dtap0".into());
    config.topology = "paired";
    config.netns = Some(netns.name().to_owned());
    let mut testpmd = Testpmd::start(&config).unwrap();
    netns.configure("dtap0", "10.77.0.1/24").unwrap();
    netns.disable_offloads("dtap0").unwrap();
    testpmd.set_forward("io").unwrap();
    testpmd.start_forwarding().unwrap();
    testpmd
}

fn assert_ping(netns: &Netns, guest: &mut Guest) {
    let text = netns.run("ping", &["-c", "3", "-i", "0.3", "10.77.0.2"]).unwrap();
    assert!(text.contains("3 received"), "{text}");
    let text = netns.run("ping", &["-c", "2", "-i", "0.3", "-s", "8000", "10.77.0.2"]).unwrap();
    assert!(text.contains("2 received"), "{text}");
    let text = guest.check("ping -c 2 10.77.0.1").unwrap();
    assert!(text.contains("2 packets received"), "{text}");
}

#[test]
fn guest_reaches_a_namespace() {
    let Some(()) = require(&NEEDS) else { return };
    let _cores = exclusive();
    let (dir, netns) = (TempDir::new().unwrap(), Netns::new().unwrap());
    let _testpmd = vhost_and_tap(&netns, &NetVhost::new(dir.file("s")));
    let nic = Nic::new(dir.file("s"), "52:54:00:00:00:02", "10.77.0.2/24");
    let mut guest =
        Guest::boot(&GuestConfig { core: Some(1), nics: vec![nic], ..GuestConfig::default() }).unwrap();
    assert_ping(&netns, &mut guest);
    guest.reboot().unwrap();
    assert_ping(&netns, &mut guest);
}

/// QEMU creates the socket of the first interface. The back end of the second one is killed and started again.
#[test]
fn guest_socket_outlives_a_back_end() {
    let Some(()) = require(&NEEDS) else { return };
    let _cores = exclusive();
    let (dir, netns) = (TempDir::new().unwrap(), Netns::new().unwrap());
    let nic = |server| Nic { server, ..Nic::new(dir.file("s"), "52:54:00:00:00:02", "10.77.0.2/24") };
    for server in [true, false] {
        let config = GuestConfig { core: Some(1), nics: vec![nic(server)], ..GuestConfig::default() };
        let back_end = NetVhost { client: server, ..NetVhost::new(dir.file("s")) };
        // The connecting side starts first and has to retry.
        let mut guest;
        let mut testpmd;
        if server {
            testpmd = vhost_and_tap(&netns, &back_end);
            guest = Guest::spawn(&config).unwrap();
        } else {
            guest = Guest::spawn(&config).unwrap();
            testpmd = vhost_and_tap(&netns, &back_end);
        }
        guest.wait_ready().unwrap();
        assert_ping(&netns, &mut guest);

        testpmd.kill();
        // A killed back end leaves its socket file, which prevents the next one from binding.
        if !server {
            std::fs::remove_file(dir.file("s")).unwrap();
        }
        testpmd = vhost_and_tap(&netns, &back_end);
        testpmd.wait_link_up(0).unwrap();
        assert_ping(&netns, &mut guest);
        drop(guest);
        drop(testpmd);
        let _ = std::fs::remove_file(dir.file("s"));
    }
}

#[test]
fn guest_has_its_queues_and_rings() {
    let Some(()) = require(&NEEDS) else { return };
    let _cores = exclusive();
    let (dir, netns) = (TempDir::new().unwrap(), Netns::new().unwrap());
    let testpmd = vhost_and_tap(&netns, &NetVhost { queues: 2, ..NetVhost::new(dir.file("s")) });
    let nic = Nic {
        queues: 2,
        queue_size: Some(1024),
        packed: true,
        mrg_rxbuf: false,
        ..Nic::new(dir.file("s"), "52:54:00:00:00:02", "10.77.0.2/24")
    };
    let mut guest =
        Guest::boot(&GuestConfig { cpus: 2, core: Some(1), nics: vec![nic], ..GuestConfig::default() })
            .unwrap();
    assert_ping(&netns, &mut guest);
    let channels = guest.check("ethtool -l eth0").unwrap();
    let combined: Vec<_> = channels.lines().filter(|line| line.starts_with("Combined:")).collect();
    assert!(combined.len() == 2 && combined.iter().all(|line| line.ends_with('2')), "{channels}");
    let rings = guest.check("ethtool -g eth0").unwrap();
    assert!(rings.contains("1024"), "{rings}");

    let log = testpmd.log();
    let (_, features) = log.rsplit_once("negotiated Virtio features: 0x").expect("testpmd logs them");
    let features = u64::from_str_radix(features.lines().next().unwrap().trim(), 16).unwrap();
    const MRG_RXBUF: u64 = 1 << 15;
    const VIRTIO_F_RING_PACKED: u64 = 1 << 34;
    assert_eq!(features & (MRG_RXBUF | VIRTIO_F_RING_PACKED), VIRTIO_F_RING_PACKED, "{features:#x}");
}
