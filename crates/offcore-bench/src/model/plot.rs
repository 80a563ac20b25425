//! Draws the model's errors as SVG: one line per point, and the tolerance band.

use std::path::Path;

use anyhow::{Result, ensure};
use plotters::prelude::*;

use super::TOLERANCE;
use crate::report::row::Row;
use crate::report::svg::{self, Area};

/// Height of a line in pixels.
const LINE: u32 = 24;
/// Pixels above the lines. The axis takes another 50 pixels below the lines.
const HEAD: u32 = 84;
/// Pixels on the left for names.
const NAMES: u32 = 290;
/// Width of the drawing in pixels.
const WIDTH: u32 = 820;
/// Range of the drawn errors. Larger errors are drawn at the edge.
const REACH: f64 = 0.3;

/// Draws `rows` of the model.
///
/// # Errors
/// If `rows` has no row of the model, or the file cannot be written.
pub fn errors(rows: &[Row], path: &Path) -> Result<()> {
    let points: Vec<_> = rows.iter().filter_map(|row| Some((row, row.model.error?))).collect();
    ensure!(!points.is_empty(), "there is nothing to draw: no row is of the model");
    let lines = u32::try_from(points.len())?;
    svg::write(path, (WIDTH, HEAD + LINE * lines + 50), |root| draw(&points, root))
}

fn draw(points: &[(&Row, f64)], root: &Area<'_>) -> Result<()> {
    let lines = u32::try_from(points.len())?;
    let text = |size: i32| ("sans-serif", size).into_font().color(&BLACK);
    root.draw_text("The simulated DSA against published figures", &text(20), (16, 14))?;
    let meaning =
        "Error in percent; shaded: close enough. Ranges and lower bounds have none while they are met.";
    root.draw_text(meaning, &text(13), (16, 42))?;
    let (_, body) = root.split_vertically(HEAD - 10);
    let mut chart = ChartBuilder::on(&body)
        .margin_right(20)
        .x_label_area_size(40)
        .y_label_area_size(NAMES)
        .build_cartesian_2d(-REACH * 100.0..REACH * 100.0, 0.0..f64::from(lines))?;
    chart.configure_mesh().disable_y_mesh().disable_y_axis().x_desc("error, %").y_labels(0).draw()?;
    let band = [(-TOLERANCE * 100.0, 0.0), (TOLERANCE * 100.0, f64::from(lines))];
    chart.draw_series([Rectangle::new(band, RGBColor(0, 114, 178).mix(0.12).filled())])?;
    for (index, (row, error)) in points.iter().enumerate() {
        let y = f64::from(lines) - 0.5 - index as f64;
        let x = error.clamp(-REACH, REACH) * 100.0;
        let role = row.model.role.unwrap_or_default();
        let colour = if role == "judged" { RGBColor(213, 94, 0) } else { RGBColor(90, 90, 90) };
        chart.draw_series([PathElement::new([(0.0, y), (x, y)], colour.stroke_width(3))])?;
        chart.draw_series([Circle::new((x, y), 4, colour.filled())])?;
        let at = (16, HEAD as i32 - 6 + (LINE * u32::try_from(index)?) as i32);
        root.draw_text(&format!("{} ({role})", row.head.case), &text(12), at)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::tempdir::TempDir;

    #[test]
    fn points_are_drawn_and_named() {
        let dir = TempDir::new().unwrap();
        let path = dir.file("model.svg");
        let row = |case: &str, error| {
            let mut row = Row::new("model", case, "virtual-clock");
            (row.model.error, row.model.role) = (Some(error), Some("judged"));
            row
        };
        errors(&[row("1 MiB", 0.01), row("32 KiB", -0.5)], &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert!(svg.contains("1 MiB (judged)") && svg.contains("32 KiB"), "{svg}");
        assert_eq!(svg.matches("<circle").count(), 2);
        assert!(errors(&[], &path).is_err());
    }
}
