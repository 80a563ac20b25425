//! SVG drawings.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use plotters::coord::Shift;
use plotters::prelude::*;

/// Palette of Okabe and Ito, which is suitable for colour-blind readers.
pub(crate) const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(90, 90, 90),
];

pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Writes the output of `draw` to `path`, on a white background.
pub(crate) fn write(path: &Path, size: (u32, u32), draw: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<()> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        draw(&root).context("drawing")?;
        root.present()?;
    }
    let written = File::create_new(path).and_then(|mut file| file.write_all(svg.as_bytes()));
    written.with_context(|| format!("writing {}", path.display()))
}
