//! Draws rows as SVG: one panel per table.

use std::path::Path;

use anyhow::{Result, ensure};
use plotters::prelude::*;

use super::Case;
use crate::report::row::{GpuColumns, Row};
use crate::report::svg::{self, Area, COLOURS};

/// Size of a panel in pixels.
const PANEL: (u32, u32) = (460, 400);
/// Maximum number of panels side by side.
const COLUMNS: usize = 3;
/// Pixels above the panels.
const HEAD: u32 = 56;
/// A line of a panel.
#[derive(Debug)]
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

/// A coordinate system with a logarithmic x axis.
#[derive(Debug)]
struct Panel {
    title: String,
    x: &'static str,
    y: &'static str,
    lines: Vec<Line>,
}

/// Draws the measured cells of the two published tables with the published figures, the artificial processing times,
/// and the break-even by work with the core's rate.
///
/// # Errors
/// If no row belongs to these cases, or the file cannot be written.
pub fn draw(rows: &[Row], path: &Path) -> Result<()> {
    let rows: Vec<_> = rows.iter().filter_map(|row| Some((row, row.gpu.as_ref()?))).collect();
    let panels = panels(&rows);
    ensure!(!panels.is_empty(), "no rows to plot: expected case io, workload, forced or break-even");
    let columns = panels.len().min(COLUMNS);
    let size =
        (PANEL.0 * u32::try_from(columns)?, HEAD + PANEL.1 * u32::try_from(panels.len().div_ceil(columns))?);
    let title = match rows.iter().find(|(row, _)| row.head.mode == "offload") {
        Some((row, _)) if row.figures.simulated => {
            "Packets through a GPU's stand-in on threads (no GPU)".into()
        }
        Some((_, gpu)) => {
            let device = gpu.setup.device_name.as_ref().unwrap_or(&gpu.setup.device);
            format!("Packets through {device}, {} pipelines", gpu.setup.pipelines)
        }
        None => "Packets through pipelines without a device".into(),
    };
    svg::write(path, size, |root| {
        root.draw_text(&title, &("sans-serif", 20).into_font().color(&BLACK), (16, 14))?;
        let (_, body) = root.split_vertically(HEAD);
        for (panel, area) in panels.iter().zip(body.split_evenly((panels.len().div_ceil(columns), columns))) {
            draw_panel(panel, &area)?;
        }
        Ok(())
    })
}

type GpuRow<'a> = (&'a Row, &'a GpuColumns);

fn panels(rows: &[GpuRow<'_>]) -> Vec<Panel> {
    let of =
        |case: Case| rows.iter().copied().filter(|(row, _)| row.head.case == case.name()).collect::<Vec<_>>();
    let (burst, gbps) = ("packets per burst", "Gbit/s");
    let mut panels = Vec::new();
    let (io, workload) = (of(Case::Io), of(Case::Workload));
    for (title, x, rows) in
        [("Forwarding", "frame length in bytes, including FCS", &io), ("MAC swap", burst, &workload)]
    {
        let at = |row: &Row| if title == "Forwarding" { row.head.frame } else { row.head.burst } as f64;
        let mut lines = lines(rows, |row, gpu| (name(gpu), (at(row), row.figures.gbps)));
        lines.extend(published(rows, at));
        panels.push(Panel { title: title.into(), x, y: gbps, lines });
    }
    for (case, y) in [(Case::Forced, gbps), (Case::BreakEven, "million packets per second")] {
        let rows = of(case);
        let kind = |gpu: &GpuColumns| match case {
            Case::Forced => gpu.forced_ns_per_packet.map(|ns| format!("{ns} ns a packet")),
            _ => Some(gpu.setup.work.into()),
        };
        let mut kinds: Vec<_> = rows.iter().filter_map(|(_, gpu)| kind(gpu)).collect();
        kinds.dedup();
        for title in kinds.iter().enumerate().filter(|(i, k)| !kinds[..*i].contains(k)).map(|(_, k)| k) {
            let rows: Vec<_> =
                rows.iter().copied().filter(|(_, gpu)| kind(gpu).as_ref() == Some(title)).collect();
            let lines = lines(&rows, |row, gpu| {
                (
                    name(gpu),
                    (row.head.burst as f64, if y == gbps { row.figures.gbps } else { row.figures.mpps }),
                )
            });
            panels.push(Panel { title: title.clone(), x: burst, y, lines });
        }
    }
    panels.retain(|panel| !panel.lines.is_empty());
    panels
}

/// Returns the name of a line.
fn name(gpu: &GpuColumns) -> String {
    match gpu.setup.device.as_str() {
        "none" => gpu.setup.workload.into(),
        _ => format!("{}, memory {}", gpu.setup.workload, gpu.setup.memory),
    }
}

/// Returns the points of `rows`, grouped by the names of their lines.
fn lines(rows: &[GpuRow<'_>], point: impl Fn(&Row, &GpuColumns) -> (String, (f64, f64))) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for (row, gpu) in rows {
        let (name, point) = point(row, gpu);
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => lines.push(Line { name, points: vec![point] }),
        }
    }
    lines.iter_mut().for_each(|line| line.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    lines
}

/// Returns the published figures for `rows`.
fn published(rows: &[GpuRow<'_>], at: impl Fn(&Row) -> f64) -> Vec<Line> {
    let with: Vec<_> = rows.iter().copied().filter(|(row, _)| row.published.published.is_some()).collect();
    let mut lines = lines(&with, |row, gpu| {
        let name = match gpu.setup.memory {
            // The first table compares memories, the second compares workloads.
            "host" if row.head.case == Case::Io.name() => "published, CPU memory".into(),
            _ if row.head.case == Case::Io.name() => "published, A100 memory".into(),
            _ => format!("published, {}", gpu.setup.workload),
        };
        (name, (at(row), row.published.published.unwrap_or_default()))
    });
    lines.iter_mut().for_each(|line| line.points.dedup());
    lines
}

fn draw_panel(panel: &Panel, area: &Area<'_>) -> Result<()> {
    let all = || panel.lines.iter().flat_map(|line| &line.points);
    let left = all().map(|point| point.0).fold(f64::MAX, f64::min);
    let right = all().map(|point| point.0).fold(left, f64::max);
    let top = all().map(|point| point.1).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 15))
        .margin(10)
        .margin_right(20)
        .x_label_area_size(44)
        .y_label_area_size(58)
        .build_cartesian_2d((left / 1.2..right * 1.2).log_scale(), 0.0..(top * 1.35).max(1e-3))?;
    chart
        .configure_mesh()
        .x_desc(panel.x)
        .y_desc(panel.y)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| if top < 10.0 { format!("{y:.1}") } else { format!("{y:.0}") })
        .label_style(("sans-serif", 12))
        .axis_desc_style(("sans-serif", 13))
        .bold_line_style(BLACK.mix(0.12))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (line, index) in panel.lines.iter().zip(0..) {
        let colour = COLOURS[index % COLOURS.len()];
        let theirs = line.name.starts_with("published");
        let style = if theirs { colour.mix(0.5).stroke_width(1) } else { colour.stroke_width(2) };
        let points = || line.points.iter().copied();
        chart
            .draw_series(LineSeries::new(points(), style))?
            .label(line.name.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        if theirs {
            chart.draw_series(points().map(|point| Cross::new(point, 4, style)))?;
        } else {
            chart.draw_series(points().map(|point| Circle::new(point, 3, colour.filled())))?;
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .label_font(("sans-serif", 11))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::tempdir::TempDir;
    use crate::report::row::GpuSetup;

    fn row(case: Case, workload: &'static str, burst: usize, gbps: f64) -> Row {
        let device = if workload == "none" { "none" } else { "host" };
        let mut row = Row::new("gpu", case, "end-to-end");
        row.head.mode = if device == "none" { "cpu" } else { "offload" }.into();
        (row.head.frame, row.head.burst) = (1024, burst);
        (row.figures.simulated, row.figures.gbps, row.figures.mpps) = (device == "host", gbps, gbps / 8.192);
        row.published.published = (workload == "graph").then_some(90.0);
        let gpu =
            GpuSetup { workload, work: "match", memory: "gpu", device: device.into(), ..GpuSetup::default() };
        row.gpu = Some(GpuColumns { setup: gpu, ..GpuColumns::default() });
        row
    }

    #[test]
    fn tables_have_panels() {
        let dir = TempDir::new().unwrap();
        let path = dir.file("gpu.svg");
        let mut rows = Vec::new();
        for case in [Case::Io, Case::Workload, Case::BreakEven] {
            for (burst, gbps) in [(16, 20.0), (64, 60.0)] {
                rows.push(row(case, "none", burst, 200.0));
                rows.push(row(case, "graph", burst, gbps));
            }
        }
        draw(&rows, &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for words in [
            "Forwarding",
            "MAC swap",
            "match",
            "graph, memory gpu",
            "published, graph",
            "published, A100 memory",
            "no GPU",
        ] {
            assert!(svg.contains(words), "no '{words}' in {svg}");
        }
        // Two points for each of two lines in three panels.
        assert_eq!(svg.matches("<circle").count(), 12);
        assert!(draw(&[row(Case::Latency, "graph", 64, 1.0)], &path).is_err());
    }
}
