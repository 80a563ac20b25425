//! accel-config's JSON: an array of devices with their groups, which contain work queues and DSA engines.
//!
//! The reader accepts everything that accel-config accepts: older key names (`tokens_reserved` for
//! `read_buffers_reserved`), commas before a closing bracket as in accel-config's own profiles, and 0 or -1 for the
//! device's own value. Unknown keys are reported by name.

use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

use serde_json::{Map, Value, json};

use super::{ConfigError, DeviceConfig, Group, Rule, RuleBroken, WqConfig, WqType, device_number};
use crate::wq::{OpSet, WqMode};

/// The contents of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    pub devices: Vec<DeviceConfig>,
    /// The ignored settings, in words: `wq0.1: key 'colour' is not known`.
    pub ignored: Vec<String>,
}

/// Keys that `accel-config save-config` and `list` write, but that are not settings.
const DEVICE_FACTS: &str = "max_groups max_work_queues max_engines work_queue_size numa_node op_cap gen_cap iaa_cap version state \
    max_tokens max_read_buffers max_batch_size max_transfer_size configurable pasid_enabled cdev_major clients \
    errors cmd_status ims_size max_available ungrouped_workqueues ungrouped_engines";
const WQ_FACTS: &str = "cdev_minor clients state occupancy enqcmds_retries uuid";

/// Reads a file.
///
/// # Errors
/// [`ConfigError::File`], or the errors of [`parse`] with the file's name.
pub fn load(path: &Path) -> Result<Loaded, ConfigError> {
    let text =
        std::fs::read_to_string(path).map_err(|error| ConfigError::File { path: path.to_owned(), error })?;
    parse(&text).map_err(|error| match error {
        ConfigError::Json { place, problem } => {
            ConfigError::Json { place: format!("{}: {place}", path.display()), problem }
        }
        other => other,
    })
}

/// Parses the text of a file.
///
/// # Errors
/// [`ConfigError::Json`] names the place and the expected value. [`ConfigError::Rules`] reports a work queue or engine
/// that is in two groups, because [`DeviceConfig`] cannot represent it.
pub fn parse(text: &str) -> Result<Loaded, ConfigError> {
    let value: Value = serde_json::from_str(&without_trailing_commas(text)).map_err(|error| {
        let place = format!("line {}, column {}", error.line(), error.column());
        ConfigError::Json { place, problem: format!("no JSON: {error}") }
    })?;
    let Value::Array(devices) = value else {
        return Err(wrong(
            "the file",
            "expected an array of devices: [ { \"dev\": \"dsa0\", \"groups\": [ … ] } ]",
        ));
    };
    let mut reader = Reader::default();
    for device in devices {
        reader.device(device)?;
    }
    match reader.broken.is_empty() {
        true => Ok(reader.loaded),
        false => Err(ConfigError::Rules(reader.broken)),
    }
}

fn wrong(place: impl Display, problem: impl Into<String>) -> ConfigError {
    ConfigError::Json { place: place.to_string(), problem: problem.into() }
}

/// Replaces commas before a closing bracket by spaces, so that line and column numbers stay the same.
fn without_trailing_commas(text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    let (mut in_string, mut escaped, mut comma) = (false, false, None);
    for index in 0..bytes.len() {
        let byte = bytes[index];
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => {
                in_string = !in_string;
                comma = None;
            }
            _ if in_string => {}
            b',' => comma = Some(index),
            b'}' | b']' => {
                if let Some(comma) = comma.take() {
                    bytes[comma] = b' ';
                }
            }
            _ if byte.is_ascii_whitespace() => {}
            _ => comma = None,
        }
    }
    // This cannot fail, because ASCII characters were replaced by ASCII characters.
    String::from_utf8(bytes).unwrap_or_else(|_| text.into())
}

#[derive(Default)]
struct Reader {
    loaded: Loaded,
    broken: Vec<RuleBroken>,
    /// The device that is being read.
    config: DeviceConfig,
}

impl Reader {
    fn device(&mut self, device: Value) -> Result<(), ConfigError> {
        let mut fields = Fields::of(device, "a device".into(), "dsa")?;
        let name = fields.place.clone();
        if !name.starts_with("dsa") {
            self.loaded.ignored.push(format!("{name}: no DSA device"));
            return Ok(());
        }
        self.config = DeviceConfig {
            name,
            read_buffer_limit: fields.number(&["read_buffer_limit", "token_limit"])?.unwrap_or(0),
            event_log_size: fields.number(&["event_log_size"])?.filter(|size| *size > 0),
            ..DeviceConfig::default()
        };
        let groups = fields.array("groups")?;
        let parts = [fields.array("ungrouped_workqueues")?, fields.array("ungrouped_engines")?];
        let place = self.rest(fields, DEVICE_FACTS);
        for group in groups {
            self.group(group)?;
        }
        self.parts(&place, parts, None)?;
        self.loaded.devices.push(std::mem::take(&mut self.config));
        Ok(())
    }

    /// Reads work queues and engines, which are in a group or not.
    fn parts(
        &mut self,
        place: &str,
        parts: [Vec<Value>; 2],
        group: Option<usize>,
    ) -> Result<(), ConfigError> {
        let [wqs, engines] = parts;
        for wq in wqs {
            self.wq(Fields::of(wq, format!("{place}: a work queue"), "wq0.")?, group)?;
        }
        for engine in engines {
            self.engine(Fields::of(engine, format!("{place}: an engine"), "engine0.")?, group)?;
        }
        Ok(())
    }

    fn group(&mut self, group: Value) -> Result<(), ConfigError> {
        let mut fields = Fields::of(group, format!("{}: a group", self.config.name), "group0.")?;
        let index = self.index(&fields.place, "group")?;
        *at(&mut self.config.groups, index) = Group {
            // accel-config writes -1 for a value that the device does not report.
            traffic_class_a: fields.number(&["traffic_class_a"])?,
            traffic_class_b: fields.number(&["traffic_class_b"])?,
            read_buffers_reserved: fields
                .number(&["read_buffers_reserved", "tokens_reserved"])?
                .unwrap_or_default(),
            read_buffers_allowed: fields
                .number(&["read_buffers_allowed", "tokens_allowed"])?
                .filter(|allowed| *allowed > 0),
            use_read_buffer_limit: fields.switch(&["use_read_buffer_limit", "use_token_limit"])?,
            desc_progress_limit: fields.number(&["desc_progress_limit"])?.unwrap_or_default(),
            batch_progress_limit: fields.number(&["batch_progress_limit"])?.unwrap_or_default(),
        };
        let parts = [fields.array("grouped_workqueues")?, fields.array("grouped_engines")?];
        let place = self.rest(fields, "");
        self.parts(&place, parts, Some(index))
    }

    fn wq(&mut self, mut fields: Fields, in_group: Option<usize>) -> Result<(), ConfigError> {
        let name = fields.place.clone();
        let index = self.index(&name, "wq")?;
        let default = WqConfig::default();
        let kind = fields
            .word("type", &[("user", WqType::User), ("kernel", WqType::Kernel), ("none", WqType::None)])?;
        let kind = kind.unwrap_or_default();
        let said: Option<i64> = fields.integer(&["group_id"])?;
        let wq = WqConfig {
            mode: fields
                .word("mode", &[("dedicated", WqMode::Dedicated), ("shared", WqMode::Shared)])?
                .unwrap_or_default(),
            size: fields.number(&["size"])?.unwrap_or_default(),
            threshold: fields.number(&["threshold"])?.unwrap_or_default(),
            group: self.group_of(&name, in_group, said),
            priority: fields.number(&["priority"])?.unwrap_or(default.priority),
            block_on_fault: fields.switch(&["block_on_fault"])?,
            max_batch_size: fields.maximum("max_batch_size")?.unwrap_or(default.max_batch_size),
            max_transfer_size: fields.maximum("max_transfer_size")?.unwrap_or(default.max_transfer_size),
            kind,
            label: fields.text("name")?.unwrap_or_default(),
            // Files written for Linux before 6.7 do not name the driver. Each type of queue had only one then.
            driver_name: fields.text("driver_name")?.filter(|name| !name.is_empty()).unwrap_or_else(|| {
                match kind {
                    WqType::User => "user",
                    WqType::Kernel => "dmaengine",
                    WqType::None => "",
                }
                .into()
            }),
            ats_disable: fields.switch(&["ats_disable"])?,
            prs_disable: fields.switch(&["prs_disable"])?,
            op_config: fields.op_config()?,
        };
        self.rest(fields, WQ_FACTS);
        let (group, slot) = (wq.group, at(&mut self.config.wqs, index));
        let earlier = std::mem::replace(slot, wq).group;
        self.one_group(Rule::WqInOneGroup, name, [earlier, group], "exactly one group");
        Ok(())
    }

    fn engine(&mut self, mut fields: Fields, in_group: Option<usize>) -> Result<(), ConfigError> {
        let name = fields.place.clone();
        let index = self.index(&name, "engine")?;
        let said = fields.integer(&["group_id"])?;
        self.rest(fields, "");
        let group = self.group_of(&name, in_group, said);
        let earlier = std::mem::replace(at(&mut self.config.engines, index), group);
        self.one_group(Rule::EngineInOneGroup, name, [earlier, group], "one group at most");
        Ok(())
    }

    /// Returns the group of a queue or engine: its own `group_id`, or else the group that contains it in the file.
    fn group_of(&mut self, name: &str, in_group: Option<usize>, said: Option<i64>) -> Option<usize> {
        let said_group = said.and_then(|said| usize::try_from(said).ok());
        let group = match (in_group, said_group) {
            (Some(outer), Some(_)) => {
                let rule = if name.starts_with("wq") { Rule::WqInOneGroup } else { Rule::EngineInOneGroup };
                self.one_group(
                    rule,
                    name.into(),
                    [in_group, said_group],
                    "the group_id of the group it stands in",
                );
                Some(outer)
            }
            (None, Some(said)) => Some(said),
            (outer, None) => outer.filter(|_| said.is_none()),
        };
        if let Some(group) = group.filter(|group| *group < LARGEST) {
            at(&mut self.config.groups, group);
        }
        group
    }

    /// Reports a violation of a rule if two different groups are given.
    fn one_group(&mut self, rule: Rule, place: String, groups: [Option<usize>; 2], allowed: &str) {
        if let [Some(first), Some(second)] = groups
            && first != second
        {
            let found = format!("groups {first} and {second}");
            self.broken.push(RuleBroken { rule, place, found, allowed: allowed.into() });
        }
    }

    /// Reports the fields that were not read. Returns the object's name.
    fn rest(&mut self, fields: Fields, facts: &str) -> String {
        let Fields { place, map } = fields;
        let unknown = map.keys().filter(|key| !facts.split(' ').any(|fact| fact == *key));
        self.loaded.ignored.extend(unknown.map(|key| format!("{place}: key '{key}' is not known")));
        place
    }

    /// Returns the index: 1 for `wq0.1` of device 0.
    fn index(&self, name: &str, kind: &str) -> Result<usize, ConfigError> {
        let device = self.config.number();
        let numbers = name.strip_prefix(kind).and_then(|rest| rest.split_once('.'));
        let index = numbers.filter(|(number, _)| number.parse().ok() == device);
        let index = index.and_then(|(_, index)| index.parse().ok()).filter(|index| *index < LARGEST);
        index.ok_or_else(|| {
            let device = device.unwrap_or_default();
            wrong(name, format!("expected a name from {kind}{device}.0 to {kind}{device}.{}", LARGEST - 1))
        })
    }
}

/// Limit of the numbers of groups, queues and engines. Real devices have fewer.
const LARGEST: usize = 256;

/// Returns the element with this number; missing elements are created.
fn at<T: Default + Clone>(list: &mut Vec<T>, index: usize) -> &mut T {
    if list.len() <= index {
        list.resize(index + 1, T::default());
    }
    &mut list[index]
}

/// The fields of an object, taken one by one.
struct Fields {
    place: String,
    map: Map<String, Value>,
}

impl Fields {
    /// Returns the fields of the object `value`, whose name is like `example`.
    fn of(value: Value, place: String, example: &str) -> Result<Self, ConfigError> {
        let mut map = match value {
            Value::Object(map) => map,
            other => return Err(wrong(place, format!("found {other}, expected an object"))),
        };
        let problem = match map.remove("dev") {
            Some(Value::String(name)) if device_number(&name).is_some() => {
                return Ok(Self { place: name, map });
            }
            Some(other) => format!("\"dev\": found {other}"),
            None => "no \"dev\"".into(),
        };
        Err(wrong(place, format!("{problem}: expected a name such as \"{example}0\"")))
    }

    /// Returns the place of a field, for errors.
    fn at(&self, key: &str) -> String {
        format!("{}: \"{key}\"", self.place)
    }

    /// Takes the value of the first of these keys that exists. Later keys are older names of the same setting.
    fn take(&mut self, keys: &[&str]) -> Option<(String, Value)> {
        let mut found = None;
        for key in keys {
            if let Some(value) = self.map.remove(*key) {
                found = found.or(Some((self.at(key), value)));
            }
        }
        found
    }

    /// Takes an integer, which may be in quotes.
    fn integer(&mut self, keys: &[&str]) -> Result<Option<i64>, ConfigError> {
        let Some((place, value)) = self.take(keys) else { return Ok(None) };
        let number = match &value {
            Value::Number(number) => number.as_i64(),
            Value::String(text) => i64::from_str(text).ok(),
            _ => None,
        };
        number.map(Some).ok_or_else(|| wrong(place, format!("found {value}, expected a whole number")))
    }

    /// Takes a number. -1, which accel-config writes for an unknown value, counts as missing.
    fn number<T: TryFrom<i64>>(&mut self, keys: &[&str]) -> Result<Option<T>, ConfigError> {
        let Some(number) = self.integer(keys)? else { return Ok(None) };
        if number == -1 {
            return Ok(None);
        }
        T::try_from(number)
            .map(Some)
            .map_err(|_| wrong(self.at(keys[0]), format!("found {number}, which is out of range")))
    }

    /// Takes a maximum. 0 means the device's own value.
    fn maximum<T: TryFrom<i64> + Default + PartialEq>(
        &mut self,
        key: &str,
    ) -> Result<Option<T>, ConfigError> {
        Ok(self.number(&[key])?.filter(|maximum| *maximum != T::default()))
    }

    /// Takes a switch: 0 or 1.
    fn switch(&mut self, keys: &[&str]) -> Result<bool, ConfigError> {
        match self.number::<u64>(keys)? {
            None | Some(0) => Ok(false),
            Some(1) => Ok(true),
            Some(found) => Err(wrong(self.at(keys[0]), format!("found {found}, expected 0 or 1"))),
        }
    }

    fn text(&mut self, key: &str) -> Result<Option<String>, ConfigError> {
        match self.take(&[key]) {
            None | Some((_, Value::Null)) => Ok(None),
            Some((_, Value::String(text))) => Ok(Some(text)),
            Some((place, other)) => Err(wrong(place, format!("found {other}, expected text in quotes"))),
        }
    }

    fn word<T: Copy>(&mut self, key: &str, words: &[(&str, T)]) -> Result<Option<T>, ConfigError> {
        let Some(found) = self.text(key)? else { return Ok(None) };
        let known = words.iter().find(|(word, _)| *word == found);
        known.map(|(_, value)| Some(*value)).ok_or_else(|| {
            let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            let problem = format!("found \"{found}\", expected one of {}", names.join(", "));
            wrong(self.at(key), problem)
        })
    }

    fn op_config(&mut self) -> Result<Option<OpSet>, ConfigError> {
        let Some(text) = self.text("op_config")? else { return Ok(None) };
        op_set(&text).map(Some).ok_or_else(|| {
            let problem = format!("found \"{text}\", expected hexadecimal digits in groups of 8 with commas");
            wrong(self.at("op_config"), problem)
        })
    }

    fn array(&mut self, key: &str) -> Result<Vec<Value>, ConfigError> {
        match self.map.remove(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => Ok(list),
            Some(other) => Err(wrong(self.at(key), format!("found {other}, expected an array"))),
        }
    }
}

/// Parses operations as the kernel prints them: a bitmap of 32-bit words separated by commas, the highest first. Linux
/// before 6.0 prints four 64-bit words separated by spaces, the lowest first.
pub(crate) fn op_set(text: &str) -> Option<OpSet> {
    let digits = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let mut ops = OpSet::default();
    if !text.contains(',') {
        for (index, word) in text.split_whitespace().enumerate() {
            *ops.0.get_mut(index)? = digits(word)?;
        }
        return (!text.trim().is_empty()).then_some(ops);
    }
    for (index, word) in text.trim().split(',').rev().enumerate() {
        let bits = digits(word).filter(|bits| *bits <= u64::from(u32::MAX))?;
        *ops.0.get_mut(index / 2)? |= bits << (32 * (index % 2));
    }
    Some(ops)
}

/// Returns the operations as text, in the format that the kernel prints and accepts.
pub(super) fn op_text(ops: &OpSet) -> String {
    let words = ops.0.iter().rev().flat_map(|word| [word >> 32, word & u64::from(u32::MAX)]);
    words.map(|word| format!("{word:08x}")).collect::<Vec<_>>().join(",")
}

/// Returns devices in accel-config's file format.
pub fn write(devices: &[DeviceConfig]) -> String {
    let list: Vec<Value> = devices.iter().map(device_json).collect();
    // Serializing maps and strings cannot fail.
    serde_json::to_string_pretty(&list).unwrap_or_default() + "\n"
}

/// Returns a device as an object of accel-config's array, without unused groups.
pub fn device_json(config: &DeviceConfig) -> Value {
    let used =
        |group: &usize| config.engines_in(*group) > 0 || config.wqs.iter().any(|wq| wq.group == Some(*group));
    let groups: Vec<Value> =
        (0..config.groups.len()).filter(used).map(|group| group_json(config, group)).collect();
    let mut device = json!({ "dev": config.name, "read_buffer_limit": config.read_buffer_limit });
    if let Some(size) = config.event_log_size {
        device["event_log_size"] = json!(size);
    }
    device["groups"] = json!(groups);
    device
}

pub(super) fn group_json(config: &DeviceConfig, number: usize) -> Value {
    let group = &config.groups[number];
    let mut json = json!({
        "dev": config.group_name(number),
        "read_buffers_reserved": group.read_buffers_reserved,
        "use_read_buffer_limit": u8::from(group.use_read_buffer_limit),
        "read_buffers_allowed": group.read_buffers_allowed.unwrap_or(0),
        "desc_progress_limit": group.desc_progress_limit,
        "batch_progress_limit": group.batch_progress_limit,
    });
    for (key, class) in
        [("traffic_class_a", group.traffic_class_a), ("traffic_class_b", group.traffic_class_b)]
    {
        if let Some(class) = class {
            json[key] = json!(class);
        }
    }
    let wqs = config.wqs.iter().enumerate().filter(|(_, wq)| wq.group == Some(number));
    json["grouped_workqueues"] = wqs.map(|(index, wq)| wq_json(config, index, wq)).collect();
    let engines = config.engines.iter().enumerate().filter(|(_, group)| **group == Some(number));
    json["grouped_engines"] =
        engines.map(|(index, _)| json!({ "dev": config.engine_name(index), "group_id": number })).collect();
    json
}

pub(super) fn wq_json(config: &DeviceConfig, number: usize, wq: &WqConfig) -> Value {
    let mut json = json!({
        "dev": config.wq_name(number),
        "mode": wq.mode.to_string(),
        "size": wq.size,
        "group_id": wq.group,
        "priority": wq.priority,
        "block_on_fault": u8::from(wq.block_on_fault),
        "max_batch_size": wq.max_batch_size,
        "max_transfer_size": wq.max_transfer_size,
        "type": wq.kind.name(),
        "driver_name": wq.driver_name,
        "name": wq.label,
        "threshold": wq.threshold,
        "ats_disable": u8::from(wq.ats_disable),
        "prs_disable": u8::from(wq.prs_disable),
    });
    if let Some(ops) = &wq.op_config {
        json["op_config"] = json!(op_text(ops));
    }
    json
}
