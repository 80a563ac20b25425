//! Common mistakes: each ends with the right exit code, and the message names the invalid value, the expected value, or
//! the remedy.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use peers::offcore::{binary, copy_binary};
use peers::{Need, TempDir, require};

use super::capture;

/// A command line, its exit code, and words of its message. The code is 2 if the line alone is invalid, and 1
/// otherwise.
type Row = (&'static str, i32, &'static [&'static str]);

/// Flags for a short run of a switch with little memory.
const SHORT: &str = "switch --mbufs 4096 --hugepages none --duration 0.2 --stats-interval 0";

const FLAGS: &[Row] = &[
    ("--port gen: --burst 0", 2, &["--burst"]),
    ("--port gen: --burst 65", 2, &["--burst"]),
    ("--port gen: --burst=-1", 2, &["--burst"]),
    ("--port gen: --burst many", 2, &["--burst", "many"]),
    ("--port gen: --lcores 1023", 1, &["--lcores", "1023", "available lcores"]),
    ("--port gen: --lcores 0,0", 2, &["--lcores", "0"]),
    ("--port gen: --lcores x", 2, &["--lcores", "x"]),
    ("--port gen: --lcores 3-1", 2, &["--lcores", "3-1"]),
    ("--port gen: --mbufs 0", 2, &["--mbufs"]),
    ("--port gen: --mbuf-size 100", 2, &["--mbuf-size"]),
    ("--port gen: --mbuf-size 2049", 2, &["--mbuf-size"]),
    ("--port gen: --stats-interval x", 2, &["--stats-interval"]),
    ("--port gen: --format xml", 2, &["--format", "xml", "table, json"]),
    ("--port gen: --mode fast", 2, &["--mode", "fast", "auto"]),
    ("--port gen: --forward", 2, &["--forward"]),
    ("--port gen: --forward route", 2, &["--forward", "route", "mac", "l2"]),
    ("--port gen: --port-topology ring", 2, &["--port-topology", "paired, chained, loop"]),
    ("--port gen: --port gen: --forward l2 --port-topology loop", 2, &["--port-topology", "--forward l2"]),
    ("--port gen: --mode offload", 2, &["--mode offload", "--dma"]),
    ("--port gen: --mode auto", 2, &["--mode auto", "--dma"]),
    ("--ports gen:", 2, &["--ports", "--port"]),
    ("--port gen: --quick", 2, &["--quick", "--demo"]),
    ("--port gen: --eal --no-huge", 2, &["--eal"]),
    ("--port gen: --no-such-flag", 2, &["--no-such-flag", "unexpected"]),
    ("gen:", 2, &["gen:", "unexpected"]),
    ("", 2, &["--port"]),
    ("--port", 2, &["--port", "value is required"]),
    ("--port gen: --forward l2", 2, &["1", "expected 2 to"]),
    ("--port gen: --port gen: --forward l2 --vlan 2=access:1", 2, &["--vlan", "port 2", "2 ports"]),
    ("--port gen: --port gen: --forward l2 --vlan 0=access:4095", 2, &["--vlan", "4095"]),
    ("--port gen: --port gen: --forward l2 --vlan 0=both:1", 2, &["--vlan", "both"]),
    (
        "--port gen: --port gen: --forward l2 --vlan 0=access:1 --vlan 0=access:2",
        2,
        &["--vlan", "port 0 twice"],
    ),
    ("--port gen: --port gen: --vlan 0=access:1", 2, &["--vlan", "l2"]),
    ("--port gen: --port gen: --forward l2 --fdb 2=locked", 2, &["--fdb: port 2", "2 ports"]),
    ("--port gen: --port gen: --forward l2 --fdb 0=xx", 2, &["--fdb", "xx"]),
    ("--port gen: --mirror 1=pcap:-,m", 2, &["--mirror: port 1", "one port"]),
    ("--port gen: --mirror pcap:-,m", 2, &["--mirror", "no '='"]),
    ("--port gen: --mirror 0:up=pcap:-,m", 2, &["--mirror", "expected rx, tx or both"]),
    ("--port gen: --mirror 0=pcap:-,m --mirror 0=pcap:-,m", 2, &["--mirror 0=", "twice"]),
    ("--port gen: --eth-peer 0,02:00:00:00:00:01", 2, &["--eth-peer", "--forward io"]),
    ("--port gen: --forward mac --eth-peer 4,02:00:00:00:00:01", 2, &["--eth-peer", "port 4"]),
    ("--port gen: --forward mac --eth-peer 0,02:00:00:00:01", 2, &["--eth-peer", "02:00:00:00:01"]),
    ("--port gen: --txpkts 64", 2, &["--txpkts", "--forward io"]),
    ("--port gen: --forward txonly --txpkts 9", 2, &["--txpkts", "9"]),
    ("--port gen: --forward txonly --txpkts 4000000", 2, &["--txpkts"]),
    ("--port gen: --forward txonly --until-idle", 2, &["--until-idle", "txonly"]),
    ("--port gen: --until-idle", 2, &["--until-idle", "count=N"]),
    ("--port gen: --forward txonly --work-ns 5", 2, &["--work-ns", "txonly"]),
    ("--port gen: --max-latency 20", 2, &["--max-latency", "--mode auto"]),
    ("--port gen: --mac-updating", 2, &["--mac-updating", "--forward copy"]),
    ("--port gen: --rt-priority 100", 2, &["--rt-priority", "100"]),
    ("--port gen: --idle nap", 2, &["--idle", "nap"]),
];

const PORTS: &[Row] = &[
    ("--port vhost", 2, &["--port", "KIND:ARGS"]),
    ("--port vhst:/tmp/s", 2, &["vhst", "vhost"]),
    ("--port :", 2, &["--port", ":"]),
    ("--port eth0", 2, &["eth0", "expected"]),
    ("--port gen:size=10", 2, &["size=10", "from 64"]),
    ("--port gen:size=70000", 2, &["size=70000"]),
    ("--port gen:size", 2, &["size="]),
    ("--port gen:speed=9", 2, &["speed", "not known", "size"]),
    ("--port gen:size=64,size=65", 2, &["size", "twice"]),
    ("--port gen:rate=0", 2, &["rate=0"]),
    ("--port gen:rate=+5", 2, &["rate=+5"]),
    ("--port gen:queues=0", 2, &["queues=0", "from 1 to 128"]),
    ("--port gen:queues=129", 2, &["queues=129"]),
    ("--port gen:verify=no", 2, &["verify=no"]),
    ("--port gen:[", 2, &["[", "not closed"]),
    ("--port vhost:", 2, &["vhost:", "expected"]),
    ("--port vhost:queues=2", 2, &["queues=2", "it begins with"]),
    ("--port vhost:s,queues=x", 2, &["queues=x"]),
    ("--port vhost:s,mode=0999", 2, &["mode=0999"]),
    ("--port vhost:s,owner=nobody-of-that-name", 2, &["owner=nobody-of-that-name", "an existing user"]),
    ("--port vhost:s,group=no-such-group", 2, &["group=", "an existing group"]),
    ("--port vhost:s,max_memory=0", 2, &["max_memory=0"]),
    ("--port vhost:s,packed=maybe", 2, &["packed=maybe", "on or off"]),
    ("--port vhost:s,dmas=[txq0]", 2, &["txq0", "@"]),
    ("--port vhost:s --port vhost:s", 2, &["both listen at s"]),
    ("--port vhost:s --port virtio-user:s,server", 2, &["both listen at s"]),
    (
        "--port vhost:/proc/offcore.sock",
        1,
        &["/proc/offcore.sock", "sockets cannot be made in its directory"],
    ),
    ("--port vhost:no/s", 1, &["no/s", "its directory does not exist"]),
    ("--port virtio-user:no/s,server", 1, &["no/s", "its directory does not exist"]),
    ("--port vhost:text", 1, &["text", "is not a socket; remove it or choose another path"]),
    ("--port vhost:.", 1, &["."]),
    (
        "--port vhost:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        2,
        &["socket path has", "at most 107"],
    ),
    ("--port virtio-user:s,queue_size=100", 2, &["queue_size=100", "power of two"]),
    ("--port virtio-user:s,mtu=9", 2, &["mtu=9"]),
    ("--port virtio-user:s,mac=ff:ff:ff:ff:ff:ff", 2, &["mac=ff:ff:ff:ff:ff:ff"]),
    ("--port virtio-user:s,mac=1", 2, &["mac=1"]),
    ("--port virtio-user:s,peer=no-such-user", 2, &["peer=no-such-user"]),
    ("--port virtio-user:text", 1, &["text", "is not a socket"]),
    (
        "--port virtio-user:s,mtu=9000,queue_size=4",
        2,
        &["packets take 6 buffers of 1792 bytes", "expected at most 4", "--mbuf-size", "queue_size"],
    ),
    ("--port af_packet:", 2, &["expected the interface's name"]),
    ("--port af_packet:no-interface-has-such-a-name", 2, &["at most 15"]),
    ("--port af_packet:a/b", 2, &["a/b"]),
    ("--port af_packet:nope0", 1, &["no interface 'nope0'", "offcore port list"]),
    ("--port af_packet:nope0,fanout=fair", 2, &["fanout=fair", "hash"]),
    ("--port af_packet:nope0,slots=9", 2, &["slots=9", "from 64"]),
    ("--port af_xdp:nope0", 1, &["no interface 'nope0'", "offcore port list"]),
    ("--port af_xdp:nope0,mode=fast", 2, &["mode=fast", "auto, zc, copy, skb"]),
    ("--port af_xdp:nope0,ring_size=100", 2, &["ring_size=100", "power of two"]),
    ("--port af_xdp:nope0,first=5000", 2, &["first=5000"]),
    ("--port af_xdp:nope0,force=perhaps", 2, &["force=perhaps", "on or off"]),
    ("--port tap:", 2, &["expected the interface's name"]),
    ("--port tap:lo", 1, &["lo"]),
    ("--port tap:t0 --port tap:t0", 2, &["both have interface t0"]),
    ("--port tap:t0 --port af_packet:t0", 2, &["both have interface t0"]),
    ("--port dpdk:", 2, &["expected"]),
    ("--port pcap:", 2, &["names no file"]),
    ("--port pcap:-,-", 2, &["names no file"]),
    ("--port pcap:in,in", 2, &["the same file"]),
    ("--port pcap:in,out,again", 2, &["again", "loop, overwrite"]),
    ("--port pcap:-,out,loop", 2, &["'loop' is given without an input"]),
    ("--port pcap:in,overwrite", 2, &["'overwrite' is given without an output"]),
    ("--port pcap:in,o --port pcap:in,o", 2, &["both write o"]),
    ("--port pcap:missing", 1, &["missing", "No such file"]),
    ("--port pcap:text", 1, &["text", "not a pcap file"]),
    ("--port pcap:empty,loop", 1, &["empty", "no packets that could be repeated"]),
    ("--port pcap:cut,loop", 1, &["cut", "ends within record"]),
    ("--port pcap:.", 1, &["Is a directory"]),
    ("--port pcap:-,.", 1, &["Is a directory"]),
    ("--port pcap:-,no/out", 1, &["no/out", "No such file"]),
    ("--port pcap:-,/dev/full", 1, &["/dev/full", "No space left"]),
    ("--port pcap:-,/proc/out", 1, &["/proc/out"]),
    ("--port pcap:in --port pcap:-,in", 1, &["which port 'pcap:in,-' reads"]),
    ("--port pcap:in --port pcap:-,./in,overwrite", 1, &["which port 'pcap:in,-' reads"]),
    ("--port pcap:in --mirror 0=pcap:-,in", 1, &["which port 'pcap:in,-' reads"]),
    ("--port pcap:in --port pcap:-,text", 1, &["text", "it exists", "overwrite"]),
    ("--port pcap:in,./in,overwrite", 1, &["which it reads"]),
    ("--port pcap:-,a --port pcap:-,./a", 1, &["which port 'pcap:-,a' writes"]),
    ("--port impair:", 2, &["impair"]),
    ("--port impair:loss=101%,gen:", 2, &["loss=101%"]),
    ("--port impair:loss=5,gen:", 2, &["loss=5", "%"]),
    ("--port impair:delay=9,gen:", 2, &["delay=9"]),
    ("--port impair:loss=1%", 2, &["impair"]),
    ("--port impair:loss=1%,pcap:missing", 1, &["missing", "No such file"]),
];

const CHANNELS: &[Row] = &[
    ("--port vhost:s --dma txq0", 2, &["--dma", "txq0"]),
    ("--port vhost:s --dma txq0@", 2, &["--dma"]),
    ("--port vhost:s --dma txq0@foo:1", 2, &["channel 'foo:1'", "expected cpu, core:N"]),
    ("--port vhost:s --dma txq0@core:x", 2, &["channel 'core:x'", "'x' is no lcore"]),
    ("--port vhost:s --dma txq0@core:1023", 1, &["core:1023", "available lcores"]),
    ("--port vhost:s --dma rxq5@cpu", 2, &["rxq5", "is not there", "from 0 to 0"]),
    ("--port vhost:s --dma 1.txq0@cpu", 2, &["--dma: port 1", "one port"]),
    ("--port gen: --dma txq0@cpu", 2, &["txq0", "no copies are made", "vhost"]),
    ("--port vhost:s --dma txq0@cpu;txq0@cpu", 2, &["txq0", "twice"]),
    ("--port vhost:s,dmas=[txq0@cpu] --dma 0.txq0@cpu", 2, &["twice"]),
    ("--port vhost:s --dma txq0@dsa:wq9.9", 1, &["wq9.9", "offcore dsa list"]),
    ("--port vhost:s --dma txq0@dsa:auto", 1, &["dsa:auto", "offcore dsa doctor"]),
    ("--port vhost:s --dma txq0@dsa:wq0.0/fast", 2, &["'/fast'", "/direct"]),
    ("--port vhost:s --dma txq0@dsa:wq0.0/direct/direct", 2, &["stands there twice"]),
    ("--port vhost:s --dma txq0@dmadev:nope", 1, &["dmadev:nope"]),
    ("--port vhost:s --dma txq0@dsa-sim0:wq0.0", 2, &["--dsa-sim: none is dsa-sim0"]),
    ("--port vhost:s --dsa-sim 0", 2, &["--dsa-sim: no channel names dsa-sim0"]),
    ("--port vhost:s --dsa-sim x", 2, &["'x' is no device number"]),
    ("--port vhost:s --dsa-sim 0:speed=1", 2, &["speed=1", "profile="]),
    ("--port vhost:s --dsa-sim 0:gen=nine --dma txq0@dsa-sim0:wq0.0", 2, &["gen=nine"]),
    ("--port vhost:s --dsa-sim 0:fault=9 --dma txq0@dsa-sim0:wq0.0", 2, &["fault="]),
    ("--port vhost:s --dsa-sim 0:seed=x --dma txq0@dsa-sim0:wq0.0", 2, &["--dsa-sim", "seed=NUMBER"]),
    ("--port vhost:s --dsa-sim 0:lcore=x --dma txq0@dsa-sim0:wq0.0", 2, &["lcore=x"]),
    ("--port vhost:s --dsa-sim 0:profile=missing --dma txq0@dsa-sim0:wq0.0", 1, &["'missing'", "vhost"]),
    ("--port vhost:s --dsa-sim 0 --dma txq0@dsa-sim0:wq9.0", 1, &["wq9.0", "it has"]),
    ("--port vhost:s --dsa-sim 0 --dsa-sim 0 --dma txq0@dsa-sim0:wq0.0", 2, &["dsa-sim0 twice"]),
];

/// Whole command lines.
const COMMANDS: &[Row] = &[
    ("", 2, &["Usage"]),
    ("swich", 2, &["swich", "switch"]),
    (
        "switch --port gen:size=40000 --mbufs 64",
        2,
        &["size=40000", "at most 28676", "--mbufs", "--mbuf-size"],
    ),
    (
        "switch --port gen: --forward txonly --txpkts 40000 --mbufs 64",
        2,
        &["packets of 40000", "at most 28676", "--mbufs", "--mbuf-size"],
    ),
    (
        "switch --port gen: --mbufs 16777216 --mbuf-size 32768 --duration 1",
        1,
        &["524288 MiB of memory are wanted", "available", "--mbufs", "--mbuf-size"],
    ),
    ("dsa explain zebra", 2, &["zebra"]),
    ("bench dma --engine gpu", 2, &["--engine"]),
    ("switch --demo --port gen:", 2, &["--port cannot be used with --demo"]),
    ("tcp --demo --serve s", 2, &["--serve cannot be used with --demo"]),
    ("epping --port gen:,addr=10.0.0.2/24 -c 10.0.0.1", 2, &["-c", "ADDRESS:PORT"]),
    ("epping --port gen:,addr=10.0.0.2/24 -c 10.0.0.1:0", 2, &["ADDRESS:PORT"]),
    ("dsa doctor --root missing", 1, &["--root missing", "no such directory"]),
    ("gpu doctor --root missing", 1, &["--root missing", "no such directory"]),
    ("port list --sysfs missing", 1, &["--sysfs missing", "no such directory"]),
    // This error is found before the switch waits for the missing front end.
    ("switch --port virtio-user:missing --dma txq0@core:1", 2, &["txq0", "vhost port"]),
    ("switch --port virtio-user:missing --lcores 1023", 1, &["--lcores"]),
    ("switch --port vhost:s --dma rxq5@core:1", 2, &["rxq5", "from 0 to 0"]),
    ("switch --port gen: --hugepages 3M", 2, &["--hugepages", "3M"]),
    ("switch --port gen: --duration=-1", 2, &["--duration"]),
    ("switch --port gen: --duration soon", 2, &["--duration", "soon"]),
    ("copy", 2, &["--port"]),
    ("copy --port pcap:in -q 2", 2, &["--queues 2", "one queue"]),
    ("copy --port gen: --dma-batch 0", 2, &["--dma-batch"]),
    ("copy --port gen: --portmask 0x10", 2, &["--portmask: 0x10"]),
    ("copy --port gen: --port gen: --port-topology paired -p 1", 2, &["--portmask: 0x1"]),
    ("copy --port gen: --lcores 0 --dma rxq3@core:0", 2, &["rxq3"]),
    ("pktgen", 2, &["--port"]),
    ("pktgen --port pcap:-,out --size 63", 2, &["--size"]),
    ("pktgen --port pcap:-,out --rate fast", 2, &["--rate", "fast"]),
    ("pktgen --port pcap:-,out --rate 50%", 2, &["--link"]),
    ("pktgen --port pcap:-,out --pcap missing", 1, &["missing", "No such file"]),
    ("pktgen --port pcap:-,out --pcap text", 1, &["text", "not a pcap file"]),
    ("pktgen --port pcap:-,text --count 1", 1, &["text", "it exists"]),
    ("pktgen --port pcap:-,out --rfc2544 --plot p.png", 2, &["--plot", ".svg"]),
    ("pktgen --port pcap:-,out --rfc2544 --plot no/p.svg", 1, &["--plot", "no directory no"]),
    ("gpu --port gen: -w kernel --device cuda:7", 1, &["cuda:7"]),
    ("gpu --port gen: -w kernel --device tpu", 2, &["--device", "tpu"]),
    ("gpu --port gen: -w kernel --device host --work match", 2, &["--patterns"]),
    (
        "gpu --port gen: -w kernel --device host --work match --patterns missing",
        1,
        &["--patterns", "missing"],
    ),
    ("gpu --port gen: --device host", 2, &["--device", "--workload kernel"]),
    ("tcp", 2, &["--port"]),
    ("tcp --port tap:t0", 2, &["addr"]),
    ("tcp --port tap:t0,addr=1.2.3", 2, &["1.2.3"]),
    (
        "tcp --port tap:t0,addr=10.77.0.2/24 --app http:/nowhere/at/all",
        2,
        &["/nowhere/at/all: No such file or directory"],
    ),
    ("exec", 2, &["exec"]),
    ("predict --no-such", 2, &["--no-such"]),
    ("bench", 2, &["bench"]),
    ("bench vhost --case none", 2, &["--case", "none"]),
    ("bench copy --plot text.svg", 1, &["--plot", "it exists"]),
    ("switch --port dpdk:net_pcap0,args=[tx_pcap=text]", 1, &["net_pcap0"]),
    ("bench copy --plot x.txt", 2, &["--plot", ".svg"]),
    ("bench copy --lcores 0,1,2", 2, &["--lcores"]),
    ("dsa", 2, &["dsa"]),
    ("dsa configure", 2, &["configure"]),
    ("port list --sysfs text", 1, &["text"]),
    ("port list --format csv", 2, &["csv"]),
];

/// Shell lines under which `$offcore` lacks something: memory, permissions, disk space, or a reader of its output.
const LACKS: &[Row] = &[
    (
        "$offcore switch --port gen: --mbufs 4194304 --mbuf-size 32768 --hugepages 2M",
        1,
        &["hugepages cannot be had", "nr_hugepages"],
    ),
    ("$nobody $offcore $short --port tap:t1", 1, &["tap:t1", "needs root or CAP_NET_ADMIN"]),
    ("$nobody $offcore $short --port af_packet:lo", 1, &["af_packet:lo", "needs root or CAP_NET_RAW"]),
    (
        "$nobody $offcore $short --port vhost:/s",
        1,
        &["vhost:/s", "its directory has to be writable", "Permission denied"],
    ),
    ("$nobody $offcore $short --port pcap:secret", 1, &["secret", "Permission denied"]),
    ("$nobody $offcore $short --port gen: --rt-priority 50", 1, &["CAP_SYS_NICE"]),
    ("$nobody $offcore $short --port gen:count=1 --port pcap:-,/out", 1, &["/out", "Permission denied"]),
    (
        "$nobody $offcore $short --port gen: --port vhost:s,owner=root",
        1,
        &["owner", "Operation not permitted"],
    ),
    ("$offcore $short --port gen: >/dev/full", 1, &["stdout", "No space left"]),
    ("$offcore $short --port gen: --format json >/dev/full", 1, &["stdout", "No space left"]),
    ("$offcore --version >/dev/full", 1, &["written", "No space left"]),
    ("$offcore switch --help >/dev/full", 1, &["written", "No space left"]),
    ("OFFCORE_LOG=$(printf '\\377') $offcore port list", 2, &["OFFCORE_LOG", "is no level"]),
    ("$offcore port list >/dev/full", 1, &["stdout", "No space left"]),
    ("$offcore dsa explain 0x83 >/dev/full", 1, &["stdout", "No space left"]),
    ("$offcore bench model --format json >/dev/full", 1, &["stdout", "No space left"]),
    ("$offcore pktgen --port gen: --count 1 >/dev/full", 2, &["gen"]),
    ("$offcore $short --port gen: >&-", 0, &[]),
    ("$offcore $short --port gen: 2>&-", 0, &[]),
    ("$offcore $short --port gen: 2>/dev/full", 0, &[]),
    ("$offcore $short --port gen: <&-", 0, &[]),
    (
        "ln -s $(ldd $offcore | sed -n 's/.*=> \\(.*libc[.]so[^ ]*\\).*/\\1/p') libcuda.so; \
         LD_LIBRARY_PATH=. $offcore gpu --port gen: -w kernel --device cuda:0; end=$?; rm libcuda.so; exit $end",
        1,
        &["libcuda.so has no cuDeviceGet", "LD_LIBRARY_PATH"],
    ),
    (
        "ulimit -n 8; $offcore $short --port vhost:s",
        1,
        &["descriptors", "the limit of this process is 8", "ulimit"],
    ),
    (
        "ulimit -f 20480; $offcore $short --port gen:size=1518,count=9000 --port pcap:-,out; end=$?; rm out.part; exit $end",
        1,
        &["File too large", "what was written is in 'out.part'"],
    ),
];

/// Returns the entries of a directory, with the content of files.
fn contents(dir: &Path) -> BTreeMap<String, Option<Vec<u8>>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).ok())).collect()
}

/// Checks how a command ends. Returns a message if it does not end as expected.
fn look(command: &mut Command, line: &str, code: i32, words: &[&str]) -> Option<String> {
    let began = Instant::now();
    let output = command.env("COLUMNS", "1000").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let missing: Vec<_> = words.iter().filter(|word| !said.contains(**word)).collect();
    let quiet = code != 2 || output.stdout.is_empty();
    let right =
        output.status.code() == Some(code) && missing.is_empty() && quiet && !said.contains("panicked");
    // The limit allows for a busy machine.
    let soon = began.elapsed() < Duration::from_secs(20);
    (!right || !soon).then(|| format!("{line}: {:?} with {missing:?} missing\n{said}", output.status.code()))
}

/// Runs a table's rows in a directory. Asserts that each row ends as expected and changes nothing in the directory.
fn look_at(dir: &TempDir, rows: &[(String, i32, &[&str])], command: impl Fn(&str) -> Command) {
    let before = contents(dir.path());
    let mut wrong = Vec::new();
    for (line, code, words) in rows {
        wrong.extend(look(command(line).current_dir(dir.path()), line, *code, words));
        let mut after = contents(dir.path());
        after.retain(|name, bytes| before.get(name) != Some(bytes));
        for name in after.keys() {
            wrong.push(format!("{line}: {name} is new or another one"));
            fs::remove_file(dir.file(name)).unwrap();
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), rows.len(), wrong.join("\n"));
}

#[test]
fn wrong_inputs_are_refused() {
    let Some(()) = require(&[]) else { return };
    let dir = TempDir::new().unwrap();
    fs::write(dir.file("in"), capture(5)).unwrap();
    fs::write(dir.file("empty"), capture(0)).unwrap();
    let whole = capture(5);
    fs::write(dir.file("cut"), &whole[..whole.len() - 10]).unwrap();
    for name in ["text", "text.svg"] {
        fs::write(dir.file(name), "this is no capture").unwrap();
    }
    let switches = [FLAGS, PORTS, CHANNELS].into_iter().flatten();
    let rows: Vec<_> = switches
        .map(|&(flags, code, words)| (format!("{SHORT} {flags}"), code, words))
        .chain(COMMANDS.iter().map(|&(line, code, words)| (line.to_owned(), code, words)))
        .collect();
    look_at(&dir, &rows, |line| {
        let mut command = Command::new(binary().unwrap());
        command.args(line.split_whitespace());
        command
    });
}

#[test]
fn missing_requirements_are_reported() {
    let Some(()) = require(&[Need::Root]) else { return };
    let dir = TempDir::new().unwrap();
    // Other users must be able to run the copy.
    fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
    copy_binary(&dir.file("offcore")).unwrap();
    fs::write(dir.file("secret"), "").unwrap();
    fs::set_permissions(dir.file("secret"), Permissions::from_mode(0o600)).unwrap();
    let rows: Vec<_> = LACKS.iter().map(|&(line, code, words)| (line.to_owned(), code, words)).collect();
    look_at(&dir, &rows, |line| {
        let mut command = Command::new("sh");
        command.env("short", SHORT).env("offcore", "./offcore");
        command.env("nobody", "setpriv --reuid 65534 --regid 65534 --clear-groups");
        command.args(["-c", line]);
        command
    });
}
