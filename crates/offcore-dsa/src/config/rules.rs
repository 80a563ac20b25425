//! The rules of a layout: the checks of the device when it is enabled (section 5.1) and when a work queue is enabled
//! (section 5.2), and the additional requirements of Linux. The device reports a single violated rule as a number;
//! [`check`] reports all of them by name.

use std::fmt::{self, Display, Write};
use std::ops::RangeInclusive;

use super::{DeviceCapabilities, DeviceConfig, WqConfig, WqType};
use crate::descriptor::Opcode;
use crate::wq::{WqMode, gen_cap};

/// Defines the rules, each with its name and its source.
macro_rules! rules {
    ($($(#[doc = $doc:literal])+ $rule:ident = $name:literal, $source:literal;)*) => {
        /// A rule, as named by [`Rule::name`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Rule {
            $($(#[doc = $doc])+ $rule,)*
        }

        impl Rule {
            /// All rules.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$rule),*];

            /// Returns the rule's stable name, such as `total-wq-size`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$rule => $name,)* }
            }

            /// Returns the rule's source: a section of the specification, or Linux.
            pub const fn source(self) -> &'static str {
                match self { $(Self::$rule => $source,)* }
            }
        }
    };
}

rules! {
    /// 5.1: work queues, groups and DSA engines exist in the device.
    Numbers = "numbers", "section 5.1";
    /// 5.1: the sum of the work queues' sizes does not exceed the device's.
    TotalWqSize = "total-wq-size", "section 5.1";
    /// 5.1: a work queue with a size is in exactly one group.
    WqInOneGroup = "wq-in-one-group", "section 5.1";
    /// 5.1: a work queue without a size is in no group.
    EmptyWqInNoGroup = "empty-wq-in-no-group", "section 5.1";
    /// 5.1: a DSA engine is in at most one group.
    EngineInOneGroup = "engine-in-one-group", "section 5.1";
    /// 5.1: a group has both work queues and DSA engines, or neither.
    GroupComplete = "group-complete", "section 5.1";
    /// 5.1: the limit for groups' read buffers is used only if the device supports it.
    ReadBufferLimitSupport = "read-buffer-limit-support", "section 5.1";
    /// 5.1: the limit for groups' read buffers does not exceed the device's read buffers.
    ReadBufferLimitRange = "read-buffer-limit-range", "section 5.1";
    /// 5.1: the limit for groups' read buffers is at least 4 for each DSA engine of the groups that use it.
    ReadBufferLimitPerEngine = "read-buffer-limit-per-engine", "section 5.1";
    /// 5.1: the sum of the read buffers that groups reserve does not exceed the device's.
    ReadBuffersReserved = "read-buffers-reserved", "section 5.1";
    /// 5.1: a group may use at least 4 read buffers for each of its DSA engines.
    ReadBuffersPerEngine = "read-buffers-per-engine", "section 5.1";
    /// 5.1: a group may use at least the read buffers that it reserves.
    ReadBuffersAtLeastReserved = "read-buffers-at-least-reserved", "section 5.1";
    /// 5.1: a group may use at most its reserved read buffers and the unreserved ones.
    ReadBuffersAtMostFree = "read-buffers-at-most-free", "section 5.1";
    /// 5.1: the event log exists and holds 64 entries or more.
    EventLog = "event-log", "section 5.1";
    /// 9.2.23: a traffic class is a number from 0 to 7.
    TrafficClass = "traffic-class", "section 9.2.23";
    /// 9.2.23: progress limits are 0 to 3, and 0 if the device has none.
    ProgressLimit = "progress-limit", "section 9.2.23";
    /// 5.2: a work queue has a size. (An empty queue is not enabled, so only a queue with a name, which is therefore
    /// meant to be used, violates this rule.)
    WqSizeNonZero = "wq-size-non-zero", "section 5.2";
    /// 5.2: a work queue's priority is 1 to 15.
    WqPriority = "wq-priority", "section 5.2";
    /// 5.2: a shared work queue needs PASIDs.
    SharedNeedsPasid = "shared-needs-pasid", "section 5.2";
    /// 5.2: block on fault needs the page request service and support by the device.
    BlockOnFaultNeedsPageRequests = "block-on-fault-needs-page-requests", "section 5.2";
    /// 5.2: the maximum transfer size does not exceed the device's.
    MaxTransferSize = "max-transfer-size", "section 5.2";
    /// 5.2: batches have 1 descriptor or more, and their maximum size does not exceed the device's.
    MaxBatchSize = "max-batch-size", "section 5.2";
    /// 5.2: the allowed operations are a subset of the device's.
    OpConfig = "op-config", "section 5.2";
    /// 5.2: ATS is disabled for a queue only if the device supports that.
    AtsDisableSupport = "ats-disable-support", "section 5.2";
    /// 5.2: PRS is disabled for a queue only if the device supports that and the event log is used.
    PrsDisableNeedsEventLog = "prs-disable-needs-event-log", "section 5.2";
    /// 5.2: PRS is not disabled for a queue that blocks on faults.
    PrsDisableWithBlockOnFault = "prs-disable-with-block-on-fault", "section 5.2";
    /// Linux: a shared work queue's threshold is 1 to its size.
    Threshold = "threshold", "Linux";
    /// Linux: maximum transfer and batch sizes are powers of two.
    PowerOfTwo = "power-of-two", "Linux";
    /// Linux: a used work queue has a type.
    WqType = "wq-type", "Linux";
    /// Linux: a used work queue has a name of 1 to 1024 characters.
    WqName = "wq-name", "Linux";
    /// Linux 6.7: a used work queue names the driver to bind.
    DriverName = "driver-name", "Linux";
    /// Linux: a user work queue needs PASIDs.
    UserNeedsPasid = "user-needs-pasid", "Linux";
}

/// A rule that a layout violates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleBroken {
    pub rule: Rule,
    /// The object: `dsa0`, `group0.1`, `wq0.1` or `engine0.1`.
    pub place: String,
    pub found: String,
    pub allowed: String,
}

impl Display for RuleBroken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rule, place, found, allowed } = self;
        write!(f, "{place}: {} ({}): found {found}; allowed: {allowed}", rule.name(), rule.source())
    }
}

/// Formats the violations, one per line if there are several.
pub(super) fn list(broken: &[RuleBroken]) -> String {
    match broken {
        [one] => one.to_string(),
        many => many.iter().fold(format!("{} rules are broken:", many.len()), |mut text, broken| {
            let _ = write!(text, "\n  {broken}");
            text
        }),
    }
}

/// Checks whether a device with these capabilities accepts the layout.
///
/// # Errors
/// Every violated rule: the device's first, then those for its groups, then those for its work queues.
pub fn check(config: &DeviceConfig, device: &DeviceCapabilities) -> Result<(), Vec<RuleBroken>> {
    let mut checks = Checks { config, device, broken: Vec::new() };
    checks.numbers();
    checks.sizes();
    checks.read_buffer_limit();
    checks.event_log();
    checks.read_buffers();
    for group in 0..config.groups.len() {
        checks.group(group);
    }
    for (number, wq) in config.wqs.iter().enumerate() {
        checks.membership(number, wq);
        match wq.size {
            // The other fields of an unused queue are ignored.
            0 if wq.label.is_empty() => {}
            0 => checks.wq_broken(Rule::WqSizeNonZero, number, "size 0 of a queue with a name", "1 or more"),
            _ => {
                checks.wq(number, wq);
                checks.wq_faults(number, wq);
                checks.wq_linux(number, wq);
            }
        }
    }
    if checks.broken.is_empty() { Ok(()) } else { Err(checks.broken) }
}

struct Checks<'a> {
    config: &'a DeviceConfig,
    device: &'a DeviceCapabilities,
    broken: Vec<RuleBroken>,
}

impl Checks<'_> {
    fn broken(&mut self, rule: Rule, place: String, found: impl Display, allowed: impl Display) {
        self.broken.push(RuleBroken { rule, place, found: found.to_string(), allowed: allowed.to_string() });
    }

    fn device_broken(&mut self, rule: Rule, found: impl Display, allowed: impl Display) {
        self.broken(rule, self.config.name.clone(), found, allowed);
    }

    fn group_broken(&mut self, rule: Rule, group: usize, found: impl Display, allowed: impl Display) {
        self.broken(rule, self.config.group_name(group), found, allowed);
    }

    fn wq_broken(&mut self, rule: Rule, wq: usize, found: impl Display, allowed: impl Display) {
        self.broken(rule, self.config.wq_name(wq), found, allowed);
    }

    /// Checks that groups, queues and engines exist in the device.
    fn numbers(&mut self) {
        let (config, device) = (self.config, self.device);
        let last = |used: Option<usize>| used.map_or(0, |last| last + 1);
        let wqs = last(config.wqs.iter().rposition(|wq| wq.size > 0 || wq.group.is_some()));
        let engines = last(config.engines.iter().rposition(Option::is_some));
        let in_groups =
            config.wqs.iter().filter_map(|wq| wq.group).chain(config.engines.iter().flatten().copied());
        let groups = last(in_groups.max());
        for (what, used, there) in [
            ("groups", groups, device.groups),
            ("work queues", wqs, device.wqs),
            ("DSA engines", engines, device.engines),
        ] {
            if used > there {
                self.device_broken(Rule::Numbers, format!("{used} {what}"), format!("at most {there}"));
            }
        }
    }

    fn sizes(&mut self) {
        let sum: u64 = self.config.wqs.iter().map(|wq| u64::from(wq.size)).sum();
        let total = self.device.total_wq_size;
        if sum > u64::from(total) {
            self.device_broken(Rule::TotalWqSize, format!("work queue sizes that add up to {sum}"), {
                format!("at most {total}")
            });
        }
    }

    fn read_buffer_limit(&mut self) {
        let (config, device) = (self.config, self.device);
        let limit = config.read_buffer_limit;
        if !device.read_buffer_limit {
            if limit > 0 {
                self.device_broken(Rule::ReadBufferLimitSupport, format!("read_buffer_limit {limit}"), "0");
            }
            for (number, _) in
                config.groups.iter().enumerate().filter(|(_, group)| group.use_read_buffer_limit)
            {
                self.group_broken(Rule::ReadBufferLimitSupport, number, "use_read_buffer_limit 1", "0");
            }
            return;
        }
        if limit > device.read_buffers {
            let allowed = format!("at most {}", device.read_buffers);
            self.device_broken(Rule::ReadBufferLimitRange, format!("read_buffer_limit {limit}"), allowed);
        }
        let using = config.groups.iter().enumerate().filter(|(_, group)| group.use_read_buffer_limit);
        let engines: usize = using.map(|(number, _)| config.engines_in(number)).sum();
        if (limit as usize) < 4 * engines {
            self.device_broken(
                Rule::ReadBufferLimitPerEngine,
                format!("read_buffer_limit {limit} for {engines} DSA engines in groups that use it"),
                format!("at least {}", 4 * engines),
            );
        }
    }

    fn event_log(&mut self) {
        match self.config.event_log_size {
            Some(size @ 1..) if !self.device.event_log => {
                self.device_broken(
                    Rule::EventLog,
                    format!("event_log_size {size}"),
                    "none: it has no event log",
                );
            }
            Some(size) if self.device.event_log && !(64..=0xffff).contains(&size) => {
                self.device_broken(Rule::EventLog, format!("event_log_size {size}"), "64 to 65535");
            }
            _ => {}
        }
    }

    fn read_buffers(&mut self) {
        let (config, total) = (self.config, u64::from(self.device.read_buffers));
        if total == 0 {
            return;
        }
        let used = config.groups.iter().enumerate().filter(|(number, _)| config.engines_in(*number) > 0);
        let reserved: u64 = used.clone().map(|(_, group)| u64::from(group.read_buffers_reserved)).sum();
        if reserved > total {
            self.device_broken(
                Rule::ReadBuffersReserved,
                format!("read buffers reserved that add up to {reserved}"),
                format!("at most {total}"),
            );
        }
        for (number, group) in used {
            let ours = u64::from(group.read_buffers_reserved);
            let most = ours + total.saturating_sub(reserved);
            let least = 4 * config.engines_in(number) as u64;
            // Without a setting, the group may use all read buffers.
            let allowed = group.read_buffers_allowed.map_or(most, u64::from);
            let found = format!("read_buffers_allowed {allowed}");
            if allowed < least {
                let why = format!("at least {least}, 4 for each of its DSA engines");
                self.group_broken(Rule::ReadBuffersPerEngine, number, &found, why);
            }
            if allowed < ours {
                let why = format!("at least {ours}, its read_buffers_reserved");
                self.group_broken(Rule::ReadBuffersAtLeastReserved, number, &found, why);
            }
            if allowed > most {
                let why = format!("at most {most}: {ours} reserved by it, {} not reserved", most - ours);
                self.group_broken(Rule::ReadBuffersAtMostFree, number, &found, why);
            }
        }
    }

    fn group(&mut self, number: usize) {
        let group = &self.config.groups[number];
        let wqs = self.config.used_wqs().filter(|(_, wq)| wq.group == Some(number)).count();
        let engines = self.config.engines_in(number);
        if (wqs == 0) != (engines == 0) {
            let found = format!("{wqs} work queues and {engines} DSA engines");
            self.group_broken(Rule::GroupComplete, number, found, "both or neither");
        }
        for (name, class) in [("a", group.traffic_class_a), ("b", group.traffic_class_b)] {
            if let Some(class @ 8..) = class {
                self.group_broken(
                    Rule::TrafficClass,
                    number,
                    format!("traffic_class_{name} {class}"),
                    "0 to 7",
                );
            }
        }
        let most = if self.device.progress_limits { 3 } else { 0 };
        for (name, limit) in [
            ("desc_progress_limit", group.desc_progress_limit),
            ("batch_progress_limit", group.batch_progress_limit),
        ] {
            if limit > most {
                let allowed = if most == 0 { "0: the device has none" } else { "0 to 3" };
                self.group_broken(Rule::ProgressLimit, number, format!("{name} {limit}"), allowed);
            }
        }
    }

    fn membership(&mut self, number: usize, wq: &WqConfig) {
        match (wq.size, wq.group) {
            (0, Some(group)) => {
                let found = format!("size 0 in {}", self.config.group_name(group));
                self.wq_broken(Rule::EmptyWqInNoGroup, number, found, "a size, or no group (group_id -1)");
            }
            (1.., None) => self.wq_broken(Rule::WqInOneGroup, number, "no group", "exactly one"),
            _ => {}
        }
    }

    fn wq(&mut self, number: usize, wq: &WqConfig) {
        let device = self.device;
        self.range(Rule::WqPriority, number, "priority", wq.priority.into(), 1..=15);
        if wq.mode == WqMode::Shared && !device.pasid {
            let allowed = "dedicated: PASIDs are off (intel_iommu=on,sm_on turns them on)";
            self.wq_broken(Rule::SharedNeedsPasid, number, "mode shared", allowed);
        }
        let most = device.max_transfer_size;
        self.range(Rule::MaxTransferSize, number, "max_transfer_size", wq.max_transfer_size, 0..=most);
        let most = device.max_batch_size.into();
        self.range(Rule::MaxBatchSize, number, "max_batch_size", wq.max_batch_size.into(), 1..=most);
        if let Some(ops) = wq.op_config {
            // For some devices the kernel hides Batch in op_cap, but still allows it in op_config.
            if !ops.without(Opcode::Batch).is_subset(&device.ops) {
                let found = format!("op_config {ops:?}");
                self.wq_broken(Rule::OpConfig, number, found, format!("a part of op_cap {:?}", device.ops));
            }
        }
    }

    fn wq_faults(&mut self, number: usize, wq: &WqConfig) {
        let device = self.device;
        if wq.block_on_fault && !(device.page_requests && device.gen_cap & gen_cap::BLOCK_ON_FAULT != 0) {
            let allowed = "0: the page request service is off, or the device cannot";
            self.wq_broken(Rule::BlockOnFaultNeedsPageRequests, number, "block_on_fault 1", allowed);
        }
        if wq.ats_disable && !device.wq_ats_control {
            self.wq_broken(
                Rule::AtsDisableSupport,
                number,
                "ats_disable 1",
                "0: the device has no such control",
            );
        }
        if !wq.prs_disable {
            return;
        }
        if !(device.wq_prs_control && device.event_log) {
            let allowed = "0: the device has no such control, or no event log";
            self.wq_broken(Rule::PrsDisableNeedsEventLog, number, "prs_disable 1", allowed);
        }
        if wq.block_on_fault {
            let found = "prs_disable 1 with block_on_fault 1";
            self.wq_broken(Rule::PrsDisableWithBlockOnFault, number, found, "one of them");
        }
    }

    fn wq_linux(&mut self, number: usize, wq: &WqConfig) {
        if wq.mode == WqMode::Shared {
            let most = wq.size.into();
            self.range(Rule::Threshold, number, "threshold", wq.threshold.into(), 1..=most);
        }
        for (name, value) in
            [("max_transfer_size", wq.max_transfer_size), ("max_batch_size", wq.max_batch_size.into())]
        {
            if value > 0 && !value.is_power_of_two() {
                self.wq_broken(Rule::PowerOfTwo, number, format!("{name} {value}"), {
                    format!("a power of two such as {}", value.next_power_of_two())
                });
            }
        }
        if wq.kind == WqType::None {
            self.wq_broken(Rule::WqType, number, "type none", "user or kernel");
        }
        if wq.label.is_empty() || wq.label.len() > 1024 || wq.label.contains(char::is_whitespace) {
            let found = format!("name '{}'", wq.label);
            self.wq_broken(Rule::WqName, number, found, "1 to 1024 characters without spaces");
        }
        if wq.driver_name.is_empty() {
            let allowed = "user for type user; such as dmaengine for type kernel";
            self.wq_broken(Rule::DriverName, number, "no driver_name", allowed);
        } else if (wq.kind == WqType::User) != (wq.driver_name == "user") && wq.kind != WqType::None {
            let found = format!("driver_name '{}' for type {}", wq.driver_name, wq.kind.name());
            self.wq_broken(Rule::DriverName, number, found, "user for type user and for no other");
        }
        if wq.kind == WqType::User && !self.device.pasid {
            let allowed = "PASIDs on: kernel command line intel_iommu=on,sm_on";
            self.wq_broken(Rule::UserNeedsPasid, number, "type user with PASIDs off", allowed);
        }
    }

    fn range(&mut self, rule: Rule, wq: usize, name: &str, value: u64, allowed: RangeInclusive<u64>) {
        if !allowed.contains(&value) {
            let text = format!("{} to {}", allowed.start(), allowed.end());
            self.wq_broken(rule, wq, format!("{name} {value}"), text);
        }
    }
}
