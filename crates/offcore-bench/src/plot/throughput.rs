//! Draws RFC 2544 throughputs as SVG: one line for each tolerated loss, over the frame size (RFC 2544, 26.1).

use std::path::Path;

use anyhow::{Result, ensure};
use plotters::prelude::*;

use crate::report::svg::{self, Area, COLOURS};

/// A throughput.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Frame length in bytes, including the FCS.
    pub frame: usize,
    /// Tolerated packet loss in percent.
    pub loss: f64,
    pub mpps: f64,
}

const SIZE: (u32, u32) = (820, 480);

/// Draws `points` to `path`.
///
/// # Errors
/// If `points` is empty, or the file cannot be written.
pub fn draw(points: &[Point], path: &Path) -> Result<()> {
    ensure!(!points.is_empty(), "no throughput to plot");
    svg::write(path, SIZE, |root| chart(points, root))
}

fn chart(points: &[Point], root: &Area<'_>) -> Result<()> {
    let most = |of: fn(&Point) -> f64| points.iter().map(of).fold(0.0, f64::max).max(1e-6) * 1.05;
    let text = |size: i32| ("sans-serif", size).into_font().color(&BLACK);
    root.draw_text("Throughput by RFC 2544, in each direction", &text(20), (16, 14))?;
    let (_, body) = root.split_vertically(64);
    let mut chart = ChartBuilder::on(&body)
        .margin_right(24)
        .margin_bottom(8)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..most(|point| point.frame as f64), 0.0..most(|point| point.mpps))?;
    chart
        .configure_mesh()
        .x_desc("frame size in bytes, including FCS")
        .y_desc("million packets per second")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .label_style(("sans-serif", 12))
        .axis_desc_style(("sans-serif", 13))
        .bold_line_style(BLACK.mix(0.12))
        .light_line_style(TRANSPARENT)
        .draw()?;
    let mut losses: Vec<f64> = points.iter().map(|point| point.loss).collect();
    losses.sort_by(f64::total_cmp);
    losses.dedup();
    for (index, loss) in losses.into_iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let line = points.iter().filter(|point| point.loss == loss);
        let mut line: Vec<_> = line.map(|point| (point.frame as f64, point.mpps)).collect();
        line.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart.draw_series(LineSeries::new(line.iter().copied(), colour.stroke_width(2)))?;
        chart.draw_series(line.iter().map(|&point| Circle::new(point, 4, colour.filled())))?;
        let x = 16 + 150 * i32::try_from(index)?;
        root.draw(&PathElement::new([(x, 50), (x + 28, 50)], colour.stroke_width(2)))?;
        root.draw_text(&format!("{loss} % lost"), &text(14), (x + 36, 42))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::tempdir::TempDir;

    #[test]
    fn every_loss_has_a_line_and_a_name() {
        let dir = TempDir::new().unwrap();
        let path = dir.file("throughput.svg");
        let point = |frame, loss, mpps| Point { frame, loss, mpps };
        draw(&[point(64, 0.0, 1.2), point(1518, 0.0, 0.8), point(64, 0.1, 1.4)], &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(svg.contains("0 % lost") && svg.contains("0.1 % lost") && svg.contains("FCS"), "{svg}");
        assert!(draw(&[], &path).is_err());
        assert!(draw(&[point(64, 0.0, 1.0)], &dir.path().join("no/such.svg")).is_err());
    }
}
