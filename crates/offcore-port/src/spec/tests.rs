use std::time::Duration;

use offcore_wire::ethernet::MacAddr;

use super::*;

fn parse(text: &str) -> PortSpec {
    text.parse().unwrap_or_else(|e| panic!("{e}"))
}

fn error(text: &str) -> String {
    match text.parse::<PortSpec>() {
        Ok(spec) => panic!("'{text}' was taken for {spec:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn every_kind_with_defaults() {
    let vhost = VhostSpec {
        path: "/run/vm1.sock".into(),
        queues: 1,
        client: false,
        owner: None,
        group: None,
        mode: None,
        packed: true,
        in_order: true,
        mrg: true,
        indirect: true,
        event_idx: true,
        offloads: true,
        max_memory: None,
        dmas: None,
    };
    assert_eq!(parse("vhost:/run/vm1.sock"), PortSpec::Vhost(vhost));
    let virtio_user = VirtioUserSpec {
        path: "/run/vm1.sock".into(),
        queues: 1,
        queue_size: 256,
        server: false,
        packed: false,
        mrg: true,
        event_idx: true,
        offloads: true,
        mtu: None,
        peer: None,
        mac: None,
    };
    assert_eq!(parse("virtio-user:/run/vm1.sock"), PortSpec::VirtioUser(virtio_user));
    assert_eq!(
        parse("tap:tap0"),
        PortSpec::Tap(TapSpec { name: "tap0".into(), queues: 1, offloads: true, mac: None, mtu: None })
    );
    let generator = GenSpec { size: 64, count: None, rate: None, flows: 1, verify: 1, queues: 1 };
    assert_eq!(parse("gen:"), PortSpec::Gen(generator.clone()));
    assert_eq!(parse("gen:size=64,verify"), PortSpec::Gen(generator));
}

#[test]
fn every_key() {
    assert_eq!(
        parse(
            "vhost:/run/vm1.sock,queues=2,client,packed=off,in_order=off,mrg=off,indirect=off,event_idx=off,\
             offloads=off,max_memory=4096,dmas=[txq0@wq0.0;rxq0@wq0.1,x]"
        ),
        PortSpec::Vhost(VhostSpec {
            path: "/run/vm1.sock".into(),
            queues: 2,
            client: true,
            owner: None,
            group: None,
            mode: None,
            packed: false,
            in_order: false,
            mrg: false,
            indirect: false,
            event_idx: false,
            offloads: false,
            max_memory: Some(4096),
            dmas: Some("txq0@wq0.0;rxq0@wq0.1,x".into()),
        })
    );
    assert_eq!(
        parse(
            "virtio-user:v.sock,queues=2,queue_size=1024,server,packed,mrg=on,event_idx=off,offloads=off,mtu=9000,\
             mac=02:00:00:00:00:07,peer=root"
        ),
        PortSpec::VirtioUser(VirtioUserSpec {
            path: "v.sock".into(),
            queues: 2,
            queue_size: 1024,
            server: true,
            packed: true,
            mrg: true,
            event_idx: false,
            offloads: false,
            mtu: Some(9000),
            peer: Some(0),
            mac: Some(MacAddr::local(7)),
        })
    );
    assert_eq!(
        parse("gen:size=1518,count=1M,rate=250k,flows=1000,verify=64,queues=2"),
        PortSpec::Gen(GenSpec {
            size: 1518,
            count: Some(1_000_000),
            rate: Some(250_000),
            flows: 1000,
            verify: 64,
            queues: 2
        })
    );
    assert!(matches!(parse("gen:verify=off"), PortSpec::Gen(GenSpec { verify: 0, .. })));
}

#[test]
fn capture_files() {
    let pcap = |input: Option<&str>, output: Option<&str>, repeat| {
        let (input, output) = (input.map(Into::into), output.map(Into::into));
        PortSpec::Pcap(PcapSpec { input, output, repeat, overwrite: false })
    };
    assert_eq!(parse("pcap:in.pcap,out.pcap"), pcap(Some("in.pcap"), Some("out.pcap"), false));
    assert_eq!(parse("pcap:in.pcap,out.pcap,loop"), pcap(Some("in.pcap"), Some("out.pcap"), true));
    assert_eq!(parse("pcap:in.pcap,loop"), pcap(Some("in.pcap"), None, true));
    assert_eq!(parse("pcap:in.pcap,-,loop"), pcap(Some("in.pcap"), None, true));
    assert_eq!(parse("pcap:in.pcap"), pcap(Some("in.pcap"), None, false));
    assert_eq!(parse("pcap:,out.pcap"), pcap(None, Some("out.pcap"), false));
    assert!(matches!(parse("pcap:-,out.pcap,overwrite"), PortSpec::Pcap(PcapSpec { overwrite: true, .. })));
    assert_eq!(parse("pcap:-,./loop"), pcap(None, Some("./loop"), false));
}

#[test]
fn every_af_xdp_key_is_parsed() {
    let plain = AfXdpSpec {
        name: "eth0".into(),
        queues: 1,
        first: 0,
        mode: XdpMode::Auto,
        ring_size: 1024,
        busy_poll: None,
        need_wakeup: true,
        promiscuous: true,
        force: false,
    };
    assert_eq!(parse("af_xdp:eth0"), PortSpec::AfXdp(plain.clone()));
    let text =
        "af_xdp:eth0,queues=4,first=2,mode=zc,ring_size=512,busy_poll=64,need_wakeup=off,promisc=off,force";
    let spec = AfXdpSpec {
        queues: 4,
        first: 2,
        mode: XdpMode::ZeroCopy,
        ring_size: 512,
        busy_poll: Some(64),
        need_wakeup: false,
        promiscuous: false,
        force: true,
        ..plain
    };
    assert_eq!(parse(text), PortSpec::AfXdp(spec));
}

#[test]
fn impairments_come_before_their_port() {
    let PortSpec::Impair(spec) = parse(
        "impair:loss=1%,reorder=2%,duplicate=0.5%,corrupt=0.0001%,delay=5ms,jitter=250us,rate=100M,seed=9,\
         pcap:a=b,c:d",
    ) else {
        panic!("no impair port")
    };
    let LineFaults { loss, reorder, duplicate, corrupt, delay, jitter, rate, seed } = spec.line;
    assert_eq!([loss, reorder, duplicate], [Share(10_000), Share(20_000), Share(5_000)]);
    assert_eq!((corrupt, rate, seed), (Share(1), Some(100_000_000), 9));
    assert_eq!((delay, jitter), (Duration::from_millis(5), Duration::from_micros(250)));
    assert_eq!(*spec.port, parse("pcap:a=b,c:d"));
    let PortSpec::Impair(ImpairSpec { line: plain, .. }) = parse("impair:gen:rate=7") else {
        panic!("no impair port")
    };
    assert_eq!((plain.loss, plain.delay, plain.rate, plain.seed), (Share(0), Duration::ZERO, None, 1));
    assert_eq!(*parse("impair:loss=100%,gen:size=64").bare(), parse("gen:size=64"));
}

#[test]
fn written_form_round_trips() {
    for text in [
        "gen:size=64",
        "gen:size=1518,count=7,rate=1000,flows=3,verify=64,queues=2",
        "gen:size=64,verify=off",
        "pcap:a,b",
        "pcap:a,-,loop",
        "pcap:-,b",
        "af_packet:eth0",
        "af_packet:eth0,queues=4,fanout=qm,slots=4096,promisc=off,qdisc_bypass",
        "af_xdp:eth0",
        "af_xdp:eth0,queues=4,first=2,mode=zc,ring_size=512,busy_poll=64,need_wakeup=off,promisc=off,force",
        "af_xdp:eth0,mode=copy",
        "af_xdp:eth0,mode=skb",
        "dpdk:0000:43:00.0",
        "dpdk:net_null0,queues=2,mtu=9000,rx_desc=512,tx_desc=2048",
        "dpdk:net_ring0,rss=off,promisc=off",
        "dpdk:43:00.1,queues=4,rss=[ip,tcp]",
        "dpdk:net_af_packet0,args=[iface=eth0,qpairs=2]",
        "impair:gen:size=64",
        "impair:loss=0.05%,tap:t,queues=2",
        "impair:loss=1%,reorder=12.5%,duplicate=100%,corrupt=0.0001%,delay=1500us,jitter=2ms,rate=1000,seed=0,pcap:a,b",
        "impair:delay=1s,vhost:/x,dmas=[txq0@wq0.0;rxq0@wq0.1]",
        "tap:tap0",
        "tap:tap0,queues=4",
        "tap:tap0,offloads=off",
        "tap:tap0,mac=02:00:00:00:00:07,mtu=9000",
        "vhost:/x",
        "vhost:/x,queues=2,client,packed=off,in_order=off,mrg=off,indirect=off,event_idx=off,offloads=off",
        "vhost:/x,owner=7,group=9,mode=0660,offloads=off,max_memory=1,dmas=[txq0@wq0.0;rxq0@wq0.1]",
        "virtio-user:/x",
        "virtio-user:/x,queues=2,queue_size=1024,server,packed,mrg=off,event_idx=off,mac=02:00:00:00:00:07,peer=7",
    ] {
        assert_eq!(parse(text).to_string(), text);
    }
}

/// Invalid specifications, and a part of the error of each.
const WRONG: &[(&str, &str)] = &[
    ("", "expected KIND:ARGS"),
    ("vhost:", "expected the socket's path"),
    ("vhost:queues=2", "begins with 'queues=2'"),
    ("vhost:/x,", "key '' is not known"),
    ("vhost:/x,mrg=yes", "mrg=yes: expected on or off"),
    ("vhost:/x,client,client", "'client' is given twice"),
    ("vhost:/x,group=no/such", "group=no/such: expected an existing group"),
    ("vhost:/x,owner=4294967295", "owner=4294967295: expected an existing user"),
    ("vhost:/x,mode=0680", "mode=0680: expected permissions in octal"),
    ("vhost:/x,mode=1777", "mode=1777: expected permissions in octal"),
    (
        "vhost:/x,max_memory=4k",
        "max_memory=4k: expected a size of at least 1 MiB, such as 512 (MiB), 512M or 4G",
    ),
    ("vhost:/x,max_memory=0G", "max_memory=0G: expected"),
    ("vhost:/x,max_memory=+1G", "max_memory=+1G: expected"),
    ("vhost:/x,max_memory=4194304G", "max_memory=4194304G: expected"),
    ("vhost:/x,max_memory", "max_memory=: expected"),
    ("vhost:/x,client,mode=0660", "mode is for a socket that the port creates"),
    ("virtio-user:/x,peer", "peer=: expected an existing user"),
    ("af_xdp:", "expected the interface's name"),
    ("af_xdp:e,mode=fast", "mode=fast: expected one of auto, zc, copy, skb"),
    ("af_xdp:e,ring_size=100", "ring_size=100: expected a power of two"),
    ("af_xdp:e,ring_size=32", "expected a number from 64 to 32768"),
    ("af_xdp:e,busy_poll", "busy_poll=: expected a number"),
    ("dpdk:", "as in dpdk:0000:43:00.0"),
    ("dpdk:net_null0,mtu=9", "mtu=9: expected a number from 68"),
    ("dpdk:net_null0,rx_desc=1", "rx_desc=1: expected a number from 16"),
    ("dpdk:net_null0,rss=[ip,all]", "rss=[ip,all]: expected off, or some of ip, tcp"),
    ("dpdk:net_null0,promisc=maybe", "promisc=maybe: expected on or off"),
    ("dpdk:net_null0,args=[]", "args=[]: expected a string"),
    ("dpdk:net_null0,speed=1", "key 'speed' is not known"),
    ("impair:", "names no port"),
    ("impair:loss=1%", "'loss=1%' names no port, expected one after the keys"),
    ("impair:loss=1%,", "names no port"),
    ("impair:los=1%,tap:t", "key 'los' is not known, expected loss, reorder,"),
    ("impair:tap:t,loss=1%", "port 'tap:t,loss=1%': key 'loss' is not known, expected queues"),
    ("impair:loss=1%,tpa:t", "port 'tpa:t': kind 'tpa' is not known"),
    ("impair:loss=1,tap:t", "loss=1: expected a percentage from 0% to 100%"),
    ("impair:loss,tap:t", "loss=: expected a percentage"),
    ("impair:loss=101%,tap:t", "loss=101%: expected"),
    ("impair:loss=0.00001%,tap:t", "in steps of 0.0001%"),
    ("impair:loss=-1%,tap:t", "loss=-1%: expected"),
    ("impair:delay=5,tap:t", "delay=5: expected a time from 0s to 10s"),
    ("impair:delay=11s,tap:t", "delay=11s: expected a time"),
    ("impair:delay=ms,tap:t", "delay=ms: expected a time"),
    ("impair:rate=1,tap:t", "rate=1: expected a number from 1000"),
    ("impair:loss=1%,loss=2%,tap:t", "'loss' is given twice"),
    ("impair:impair:tap:t", "impairments of 'impair:tap:t': they cannot be nested"),
    ("vhost:/x,dmas=[txq0@wq0.0", "'[' is not closed"),
    ("vhost:/x,dmas=[[a]]", "'[' is not expected"),
    ("vhost:/x,dmas=a]", "']' is not expected"),
    ("vhost:/x,dmas", "dmas=: expected a string"),
    ("vhost:/x,dmas=[]", "dmas=[]: expected a string"),
    ("virtio-user:/x,queue_size=100", "queue_size=100: expected a power of two"),
    ("virtio-user:/x,queue_size=65536", "queue_size=65536: expected a number from 2 to 32768"),
    ("virtio-user:/x,mac=1:2", "has 2 parts"),
    ("virtio-user:/x,mac", "mac=: expected a string"),
    ("virtio-user:/x,mac=ff:ff:ff:ff:ff:ff", "expected a unicast MAC address"),
    ("af_packet:eth0,fanout=all", "fanout=all: expected one of hash, lb, cpu, rollover, rnd, qm"),
    ("af_packet:eth0,fanout", "fanout=: expected one of"),
    ("af_packet:eth0,slots=63", "slots=63: expected a number from 64 to 65536"),
    ("tap:", "expected the interface's name"),
    ("tap:sixteen-letters-", "has 16 bytes, expected at most 15"),
    ("tap:a/b", "expected one without '/'"),
    ("tap:..", "expected one without '/'"),
    ("tap:t,queues=129", "queues=129: expected a number from 1 to 128"),
    ("tap:t,queues", "queues=: expected a number"),
    ("tap:t,mtu=67", "mtu=67: expected a number from 68 to 65521"),
    ("tap:t,mac=01:00:00:00:00:00", "expected a unicast MAC address"),
    ("lo", "an interface of this machine: expected af_xdp:lo or af_packet:lo"),
    ("vhost-user:/x", "kind 'vhost-user' is not known, did you mean 'vhost'?"),
    ("xdp:eth0", "did you mean 'af_xdp'?"),
    ("/run/vm.sock", "a path: expected vhost:/run/vm.sock"),
    ("pcap:", "names no file"),
    ("pcap:-,-", "names no file"),
    ("pcap:-,b,loop", "'loop' is given without an input"),
    ("pcap:a,a", "the same file"),
    ("pcap:a,b,c", "key 'c' is not known, expected loop, overwrite"),
    ("pcap:a,overwrite", "'overwrite' is given without an output"),
    ("gen:64", "key '64' is not known, expected size"),
    ("gen:size=63", "size=63: expected a number from 64 to 65553"),
    ("gen:size=+64", "size=+64: expected a number"),
    ("gen:count=0", "count=0: expected a number from 1"),
    ("gen:count=99999999999G", "expected a number"),
    ("gen:flows=65537", "flows=65537: expected a number from 1 to 65536"),
    ("gen:rate=k", "rate=k: expected a number"),
    ("gen:verify=0", "verify=0: expected a number from 1"),
    ("gen:size=é", "size=é: expected a number"),
];

#[test]
fn errors_name_found_and_expected() {
    assert_eq!(
        error("vhsot:/x"),
        "port 'vhsot:/x': kind 'vhsot' is not known, expected vhost, virtio-user, af_xdp, af_packet, \
         dpdk, tap, pcap, gen or impair"
    );
    assert_eq!(
        error("tap0"),
        "port 'tap0': expected KIND:ARGS with kind vhost, virtio-user, af_xdp, af_packet, dpdk, \
         tap, pcap, gen or impair, such as af_packet:eth0"
    );
    assert_eq!(
        error("vhost:/x,quues=2"),
        "port 'vhost:/x,quues=2': key 'quues' is not known, expected queues, client, owner, group, \
         mode, packed, in_order, mrg, indirect, event_idx, offloads, max_memory, dmas"
    );
    assert_eq!(error("tap:t,queues=0"), "port 'tap:t,queues=0': queues=0: expected a number from 1 to 128");
    for (text, part) in WRONG {
        let message = error(text);
        assert!(message.contains(part), "'{text}' gives: {message}");
    }
    let long = format!("vhost:/{}", "x".repeat(107));
    assert!(error(&long).contains("socket path has 108 bytes, expected at most 107"));
}
