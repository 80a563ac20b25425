use offcore_dma::Mode;
use offcore_flow::dma_map::QueueHalf;
use offcore_flow::host::apps::Hosted;
use offcore_flow::mirror::Direction;
use offcore_flow::switch::{Hosting, Run};

use super::*;

/// A file with these sections, which has a version and a process.
fn file(sections: &str) -> String {
    format!("version = 1\n[process]\nname = \"test\"\nlcores = [0]\n{sections}")
}

fn plan(sections: &str) -> Plan {
    parse(&file(sections), "test.toml").unwrap_or_else(|problems| panic!("{problems}"))
}

fn problems(text: &str) -> String {
    match parse(text, "test.toml") {
        Ok(plan) => panic!("accepted: {plan:?}"),
        Err(problems) => problems.to_string(),
    }
}

/// Two ports, each with these keys.
fn ports(keys: &str) -> String {
    format!("[[port]]\nname = \"a\"\nkind = \"gen\"\n{keys}\n[[port]]\nname = \"b\"\nkind = \"gen\"\n")
}

fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/run").join(name);
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn vhost_example_describes_a_bridge() {
    let plan = parse(&example("vhost.toml"), "vhost.toml").unwrap_or_else(|problems| panic!("{problems}"));
    assert_eq!(
        (plan.name.as_str(), &plan.config.names.0[..]),
        ("vhost", &["web1", "uplink", "monitor"].map(String::from)[..])
    );
    let Run::Bridge(bridge) = &plan.config.run else { panic!("{:?}", plan.config.run) };
    assert_eq!(
        bridge.vlans.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["0=access:10", "1=trunk:10,20-29"]
    );
    assert_eq!(bridge.stations[0].to_string(), "0=52:54:00:00:00:02,locked");
    assert_eq!((plan.config.mode, &plan.config.lcores[..]), (Mode::Auto, &[2, 3][..]));
    for queue in [0, 1] {
        assert_eq!(plan.config.dma.channels(0, QueueHalf::Tx, queue), ["dsa:wq0.1"]);
        assert_eq!(plan.config.dma.channels(0, QueueHalf::Rx, queue), ["dsa:wq0.0"]);
    }
    let mirror = plan.config.mirrors[0];
    assert_eq!((mirror.port, mirror.direction, mirror.to), (0, Direction::Rx, 2));
    assert_eq!(plan.ports[0].to_string(), "vhost:/run/offcore/ports/web1,queues=2,mode=0660,max_memory=4096");
}

#[test]
fn other_examples_are_accepted() {
    let copy = parse(&example("copy.toml"), "copy.toml").unwrap();
    let Run::Copy(copying) = &copy.config.run else { panic!("{:?}", copy.config.run) };
    assert_eq!((copying.max_frame, copying.eth_peers.is_some()), (1518, true));
    assert_eq!(copy.config.dma.channels(1, QueueHalf::Rx, 0), ["core:1"]);
    let rules = std::env::temp_dir().join(format!("offcore-config-{}.txt", std::process::id()));
    std::fs::write(&rules, "evil\n").unwrap();
    let text = example("gpu.toml").replace("/etc/offcore/rules.txt", rules.to_str().unwrap());
    let gpu = parse(&text, "gpu.toml");
    let steered = text
        .replace("on_match = \"drop\"", "steer = \"m\"")
        .replace("\n[[port]]", "\n[[port]]\nname = \"m\"\nkind = \"gen\"\n[[port]]");
    let steered = parse(&steered, "gpu.toml");
    std::fs::remove_file(&rules).unwrap();
    let Run::Pipelines(working) = gpu.unwrap_or_else(|problems| panic!("{problems}")).config.run else {
        panic!()
    };
    assert!(working.patterns.is_some());
    // The target of `steer` follows the other ports.
    let steered = steered.unwrap_or_else(|problems| panic!("{problems}")).config;
    assert_eq!((steered.names.0, steered.run.elsewhere()), (vec!["in".into(), "m".into()], Some(1)));
    let users = |text: String| text.replace("\"www-data\", \"redis\"", "\"root\", 33");
    let tcp = parse(&users(example("tcp.toml")), "tcp.toml").unwrap();
    let Run::Host(Hosting { app: Hosted::Others(serve), ifaces, .. }) = &tcp.config.run else {
        panic!("no host")
    };
    assert_eq!((&serve.allow[..], serve.memory, ifaces[0].addresses.len()), (&[0, 33][..], 256 << 20, 2));
    assert_eq!(tcp.config.dma.channels(0, QueueHalf::Tx, 0), ["dsa-sim0:wq0.0"]);
    let epping = parse(&example("epping.toml"), "epping.toml").unwrap();
    assert!(matches!(epping.system, System::Epping(_)));
}

#[test]
fn all_problems_are_listed_with_lines() {
    let text = "version = 2\n\
                [process]\n\
                lcore = [0]\n\
                pool = { buffers = 1, bufer = 2048 }\n\
                idle = \"nap\"\n\
                [engines.x]\n\
                kind = \"cor\"\n\
                [switch]\n\
                forward = \"l3\"\n\
                [[port]]\n\
                name = \"web1\"\n\
                kind = \"vhost\"\n\
                queues = 200\n\
                [[port]]\n\
                kind = \"gen\"\n\
                [prots]\n";
    assert_eq!(
        problems(text),
        "test.toml:1: version: expected 1\n\
         test.toml:3: process.lcore: unknown key, did you mean 'lcores'?\n\
         test.toml:4: process.pool.bufer: unknown key, did you mean 'buffer'?\n\
         test.toml:4: process.pool.buffers: found 1, expected a number from 64 to 16777216\n\
         test.toml:5: process.idle: found \"nap\", expected one of poll, sleep\n\
         test.toml:7: engines.x.kind: kind 'cor' is not known, expected one of core, dsa, dsa-sim, dmadev\n\
         test.toml:9: switch.forward: found \"l3\", expected one of io, mac, macswap, l2, rxonly, txonly, flowgen, copy\n\
         test.toml:10: port.web1: key 'socket' is missing\n\
         test.toml:13: port.web1.queues: found 200, expected a number from 1 to 128\n\
         test.toml:14: port: key 'name' is missing: each port needs a name of its own\n\
         test.toml:16: prots: unknown section, did you mean 'port'?"
    );
}

#[test]
fn syntax_errors_have_lines() {
    let text = problems("version = 1\n[switch\nforward = \"io\"\n");
    assert!(text.starts_with("test.toml:2: "), "{text}");
    let text = problems(&file("[switch]\nforward = \"io\"\nforward = \"mac\"\n"));
    assert!(text.contains("test.toml:7: ") && text.contains("duplicate key"), "{text}");
}

#[test]
fn contradictions_name_keys_and_lines() {
    let bridge = format!("[switch]\nforward = \"l2\"\n{}", ports(""));
    plan(&bridge);
    for (text, expected) in [
        (
            format!("[switch]\n{}", ports("vlan = { access = 10 }")),
            "test.toml:9: port.a.vlan: requires [switch] with forward = \"l2\"",
        ),
        (
            format!("[switch]\nforward = \"l2\"\n{}", ports("vlan = { access = 4095 }")),
            "port.a.vlan.access: found 4095, expected a number from 1 to 4094",
        ),
        (
            format!("[switch]\nforward = \"l2\"\n{}", ports("vlan = { native = 1 }")),
            "expected access, or trunk",
        ),
        (
            format!("[switch]\nframe = 64\n{}", ports("")),
            "test.toml:6: switch.frame is for switch.forward = \"txonly\" or \"flowgen\", found switch.forward = \"io\"",
        ),
        (
            format!("[copies]\nmode = \"auto\"\n[switch]\n{}", ports("")),
            "test.toml:6: copies.mode: mode auto needs engines",
        ),
        (
            format!("[copies]\nmax_latency = \"5us\"\n[switch]\n{}", ports("")),
            "copies.max_latency: requires mode = \"auto\"",
        ),
        (
            format!("[engines.h]\nkind = \"core\"\nlcore = 1\n[switch]\n{}", ports("")),
            "engines.h: no queue uses this engine",
        ),
        (
            format!("[switch]\n{}", ports("copies = { tx = [\"h\"] }")),
            "engine 'h' is not defined: add [engines.h]",
        ),
        (
            format!(
                "[engines.help]\nkind = \"core\"\nlcore = 1\n[switch]\n{}",
                ports("copies = { tx = [\"hlp\"] }")
            ),
            "did you mean 'help'?",
        ),
        (
            format!(
                "[engines.h]\nkind = \"core\"\nlcore = 1\n[switch]\n{}",
                ports("copies = { tx = [\"h\"] }")
            ),
            "port.a.copies: this port makes no copies",
        ),
        (
            format!(
                "[engines.h]\nkind = \"core\"\nlcore = 1\n[copy]\n{}",
                ports("copies = { tx = [\"h\"] }")
            ),
            "expected rx only",
        ),
        (
            format!(
                "[engines.h]\nkind = \"core\"\nlcore = 1\n[copy]\n{}",
                ports("copies = { rxq1 = [\"h\"] }")
            ),
            "the port has no such queue: its queues are 0 to 0",
        ),
        (format!("[switch]\n{}{}", ports(""), "[[mirror]]\nof = \"c\"\nto = \"b\"\n"), "mirror.of: port 'c'"),
        (format!("[switch]\n[copy]\n{}", ports("")), "sections switch and copy: expected only one"),
        (ports(""), "no system: expected one of the sections"),
        ("[switch]\n".into(), "no port"),
        (format!("[switch]\n{}", ports("").replace("\"b\"", "\"a\"")), "name 'a' is used twice"),
        (
            format!("[switch]\n{}", ports("").replace("\"b\"", "\"b/c\"")),
            "name 'b/c': expected 1 to 31 letters",
        ),
        (format!("[switch]\n{}", ports("").replace("\"b\"", "\"ring0\"")), "name 'ring0' is that of a ring"),
    ] {
        assert_refused(&text, expected);
    }
}

#[test]
fn settings_without_effect_are_refused() {
    for (text, expected) in [
        (format!("[tcp]\nallow = [\"root\"]\n{}", host("")), "add tcp.serve"),
        (format!("[tcp]\nservice = \"echo\"\nserve = \"/s\"\n{}", host("")), "cannot be used together"),
        (format!("[epping]\nconnect = \"10.0.0.1:0\"\n{}", host("")), "expected ADDRESS:PORT"),
        (format!("[tcp]\nserve = \"\"\n{}", host("")), "expected the path of a socket"),
        (format!("[tcp]\n{}", host("gateway = \"10.1.0.1\"")), "expected a gateway in the network"),
        (
            format!("[tcp]\n{}", host("vlan = { access = 10 }")),
            "port.a.vlan: found a table, expected a number from 1 to 4094",
        ),
        (format!("[gpu]\nblocks = 4\n{}", ports("")), "gpu.blocks is for a device"),
        (
            format!("[gpu]\n{}", ports("eth_peer = \"02:00:00:00:00:01\"")),
            "port.a.eth_peer: this system sets no",
        ),
        (
            format!("[gpu]\nworkload = \"kernel\"\ndevices = [\"cuda:x\"]\n{}", ports("")),
            "'cuda:x' is no device",
        ),
        (
            format!("[gpu]\nworkload = \"kernel\"\nmemory = \"direct\"\ndevices = [\"0\"]\n{}", ports("")),
            "expected only ports dpdk:",
        ),
        (
            format!("[switch]\nwork = \"2s\"\n{}", ports("")),
            "switch.work: found \"2s\", expected a time from 1ns to 1s",
        ),
        (format!("[switch]\n{}", ports("copies = { tx = [] }")), "tx: expected one engine at least"),
        (
            format!("[switch]\n{}", ports("copies = { txq00 = [\"h\"] }")),
            "'txq00': expected rx, tx, rxqN, txqN",
        ),
        (
            format!("[switch]\n{}", ports("copies = { weights = { rxq0 = 3 } }")),
            "rxq0: no engine is assigned to this queue",
        ),
        (
            format!(
                "[switch]\n{}[[mirror]]\nof = \"a\"\nto = \"b\"\n[[mirror]]\nof = \"a\"\nto = \"b\"\n",
                ports("")
            ),
            "the same mirror occurs twice",
        ),
        (
            format!(
                "[switch]\nforward = \"l2\"\n{}",
                ports("fdb = { addresses = [\"02:00:00:00:00:01,locked\"] }")
            ),
            "expected a MAC address",
        ),
        (format!("[gpu]\nworkload = \"graph\"\n{}", ports("")), "needs gpu.devices"),
    ] {
        assert_refused(&text, expected);
    }
}

fn assert_refused(sections: &str, expected: &str) {
    let found = problems(&file(sections));
    assert!(found.contains(expected), "{sections}\n{found}");
}

/// A port of a host with these keys.
fn host(keys: &str) -> String {
    format!(
        "[[port]]\nname = \"a\"\nkind = \"tap\"\ninterface = \"t\"\naddresses = [\"10.0.0.2/24\"]\n{keys}\n"
    )
}

#[test]
fn queues_have_their_own_engines_and_weights() {
    let text = "[engines.one]\nkind = \"core\"\nlcore = 0\n[engines.two]\nkind = \"dmadev\"\ndevice = \"x\"\n[switch]\n\
                [[port]]\nname = \"vm\"\nkind = \"vhost\"\nsocket = \"/s\"\nqueues = 3\n\
                copies = { tx = [\"one\"], txq1 = [\"two\", \"one\"], weights = { txq1 = 3 } }\n";
    let dma = plan(text).config.dma;
    assert_eq!(dma.channels(0, QueueHalf::Tx, 0), ["core:0"]);
    assert_eq!(dma.channels(0, QueueHalf::Tx, 1), ["dmadev:x", "core:0"]);
    assert_eq!((dma.weight(0, QueueHalf::Tx, 0), dma.weight(0, QueueHalf::Tx, 1)), (1, 3));
    assert!(dma.channels(0, QueueHalf::Rx, 0).is_empty());
}

#[test]
fn engines_may_share_a_simulated_device() {
    let engine = |name: &str, keys: &str| format!("[engines.{name}]\nkind = \"dsa-sim\"\n{keys}\n");
    let port = "[switch]\n[[port]]\nname = \"vm\"\nkind = \"vhost\"\nsocket = \"/s\"\n\
                copies = { tx = [\"a\", \"c\"], rx = [\"b\"] }\n";
    let a = engine("a", "device = 0\nwork_queues = [1]");
    let b = engine("b", "device = 0\nprofile = \"vhost\"");
    let config = plan(&format!("{a}{b}{}{port}", engine("c", ""))).config;
    assert_eq!(config.dma.channels(0, QueueHalf::Tx, 0), ["dsa-sim0:wq0.1", "dsa-sim1:wq1.0"]);
    assert_eq!(config.dma.channels(0, QueueHalf::Rx, 0), ["dsa-sim0:wq0.0"]);
    assert_eq!(config.simulators.len(), 2);
    let twice = file(&format!("{}{b}{}{port}", engine("a", "device = 0\nseed = 2"), engine("c", "")));
    assert!(problems(&twice).contains("engines.b: device 0 is described by two engines"));
}

#[test]
fn impairments_are_a_key_of_the_port() {
    let plan = plan(&format!("[switch]\n{}", ports("impair = { loss = \"1%\", delay = \"5ms\" }")));
    assert_eq!(plan.ports[0].to_string(), "impair:loss=1%,delay=5ms,gen:size=64");
}

#[test]
fn name_is_the_files_name_by_default() {
    let text = format!("version = 1\n[switch]\n{}", ports(""));
    assert_eq!(parse(&text, "/etc/offcore/vswitch0.toml").unwrap().name, "vswitch0");
    assert!(parse(&text, "/etc/offcore/a b.toml").unwrap_err().to_string().contains("name 'a b'"));
}

#[test]
fn process_settings_are_checked() {
    let with = |lcores: &str, burst: &str, section: &str| {
        problems(&format!("version = 1\n[process]\nlcores = {lcores}\n{burst}\n{section}\n{}", ports("")))
    };
    assert!(with("[0, 1, 0]", "", "[switch]").contains("process.lcores: lcore 0 occurs twice"));
    assert!(with("[\"x\"]", "", "[switch]").contains("process.lcores: found a list, expected a number"));
    assert!(with("[0]", "burst = 8", "[copy]").contains("process.burst: expected at least 32"));
}

#[test]
fn hostile_texts_are_limited_and_escaped() {
    let keys: String = (0..20_000).map(|key| format!("k{key} = 1\n")).collect();
    let found = parse(&file(&format!("{keys}[switch]\n{}", ports(""))), "x").unwrap_err().list;
    assert!((50..100).contains(&found.len()), "{} problems", found.len());
    let long = problems(&file(&format!("[switch]\n\"{}\" = 1\n{}", "y".repeat(100_000), ports(""))));
    assert!(long.len() < 1000, "{} bytes", long.len());
    let forged =
        problems(&file(&format!("[switch]\n\"a\\nother.toml:3: fine\\u001b[2J\" = 1\n{}", ports(""))));
    assert!(forged.lines().count() == 1 && !forged.contains('\u{1b}'), "{forged:?}");
}

#[test]
fn unreadable_files_are_problems() {
    for (path, expected) in [("/no/such.toml", "cannot be read"), ("/dev", "not a regular file")] {
        let found = read(Path::new(path)).unwrap_err().to_string();
        assert!(found.starts_with(path) && found.contains(expected), "{found}");
    }
}

#[test]
fn schema_describes_every_kind() {
    let schema = schema();
    let kinds = schema["properties"]["port"]["items"]["anyOf"].as_array().unwrap();
    assert_eq!(kinds.len(), 16);
    let vhost = &kinds[0];
    assert_eq!(vhost["properties"]["queues"]["default"], 1);
    assert_eq!(vhost["required"], serde_json::json!(["name", "kind", "socket"]));
    assert!(vhost["properties"]["packed"]["description"].as_str().unwrap().contains("RING_PACKED"));
    let engines = &schema["properties"]["engines"]["additionalProperties"];
    assert_eq!(engines["oneOf"].as_array().unwrap().len(), 4);
}
