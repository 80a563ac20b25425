//! Guests without a back end.

use super::*;
use crate::{Need, exclusive, require};

#[test]
fn qemu_arguments_of_an_interface() {
    let nic = Nic::new("/x/s", "52:54:00:00:00:02", "10.77.0.2/24");
    let [(_, chardev), (_, netdev), (_, device)] = nic.arguments(1);
    assert_eq!(chardev, "socket,id=c1,path=/x/s,reconnect=1");
    assert_eq!(netdev, "vhost-user,id=n1,chardev=c1,queues=1");
    assert!(device.starts_with(
        "virtio-net-pci,netdev=n1,mac=52:54:00:00:00:02,romfile=,vectors=0,packed=off,csum=off,"
    ));
    let [_, (_, netdev), (_, device)] = Nic { queues: 2, packed: true, offloads: true, ..nic }.arguments(0);
    assert!(netdev.ends_with("queues=2"));
    assert!(device.ends_with(",vectors=0,packed=on,mq=on"), "{device}");
}

#[test]
fn guest_boots_and_reboots() {
    let Some(_cores) = exclusive(&[Need::Guest]) else { return };
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
    let Some(_cores) = exclusive(&[Need::Guest]) else { return };
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
