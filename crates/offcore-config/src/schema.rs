//! The JSON Schema of files, for editors.

use offcore_port::spec::PortSpec;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use crate::plan::MirrorSection;
use crate::ports::Keys;
use crate::sections::{Copies, Copy, Engine, Epping, Gpu, Process, Switch, Tcp};

/// Returns the JSON Schema (2020-12) of configuration files.
pub fn schema() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let mut generator = settings.into_generator();
    let mut of = |key: &str| -> Value {
        let schema = match key {
            "process" => generator.subschema_for::<Process>(),
            "copies" => generator.subschema_for::<Copies>(),
            "switch" => generator.subschema_for::<Switch>(),
            "copy" => generator.subschema_for::<Copy>(),
            "gpu" => generator.subschema_for::<Gpu>(),
            "tcp" => generator.subschema_for::<Tcp>(),
            "epping" => generator.subschema_for::<Epping>(),
            "mirror" => generator.subschema_for::<MirrorSection>(),
            _ => generator.subschema_for::<Engine>(),
        };
        schema.to_value()
    };
    let sections = ["process", "copies", "switch", "copy", "gpu", "tcp", "epping"];
    let mut properties: Map<String, Value> =
        sections.into_iter().map(|key| (key.to_owned(), of(key))).collect();
    properties.insert("version".into(), json!({ "const": 1 }));
    properties.insert("engines".into(), json!({ "type": "object", "additionalProperties": of("engine") }));
    properties.insert("mirror".into(), json!({ "type": "array", "items": of("mirror") }));
    properties.insert("port".into(), json!({ "type": "array", "items": ports(&mut generator).to_value() }));
    let systems = ["switch", "copy", "gpu", "tcp", "epping"].map(|key| json!({ "required": [key] }));
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Offcore configuration",
        "type": "object",
        "properties": properties,
        "required": ["version", "port"],
        "oneOf": systems,
        "additionalProperties": false
    })
}

/// The schema of a port: by kind, with the keys of both groups of systems.
fn ports(generator: &mut SchemaGenerator) -> Schema {
    let mut kinds = Vec::new();
    for kind in PortSpec::KINDS {
        for keys in [Keys::Forwarding, Keys::Host] {
            let own = PortSpec::schema_of_kind(kind, generator).to_value();
            let common = keys.schema(generator).to_value();
            let mut properties = Map::new();
            for schema in [&own, &common] {
                let of = schema["properties"].as_object().cloned().unwrap_or_default();
                properties.extend(of);
            }
            properties.remove("dmas");
            properties.insert("name".into(), String::json_schema(generator).to_value());
            properties.insert("kind".into(), json!({ "const": kind }));
            let mut required = vec![json!("name"), json!("kind")];
            required.extend(own["required"].as_array().cloned().unwrap_or_default());
            kinds.push(json!({
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": false
            }));
        }
    }
    json_schema!({ "anyOf": kinds })
}
