//! Draws rows as SVG: panels side by side, each with a separate scale, and a common legend.

pub mod throughput;

use std::path::Path;

use anyhow::{Result, ensure};
use plotters::prelude::*;

use crate::guests::workload::Route;
use crate::method::temperature::Temperature;
use crate::report::row::Row;
use crate::report::svg::{self, Area};

/// Size of a panel in pixels.
const PANEL: (u32, u32) = (400, 360);
/// Pixels above the panels for title, explanation and legend.
const HEAD: u32 = 92;
/// Maximum number of panels side by side.
const COLUMNS: usize = 3;
/// Pixels between the drawing's edge and its text.
const EDGE: i32 = 16;

/// Series of a drawing. They differ in colour (palette of Okabe and Ito, suitable for colour-blind readers) and in
/// mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Series {
    Cpu,
    Offload,
    DpdkLib,
    GuideCore,
    GuideDsa,
}

impl Series {
    const ALL: [Self; 5] = [Self::Cpu, Self::Offload, Self::DpdkLib, Self::GuideCore, Self::GuideDsa];

    /// Returns the series of a row.
    fn of(row: &Row) -> Option<Self> {
        match (row.head.engine.as_str(), row.head.mode.as_str()) {
            // Rows with a background copier are not drawn.
            _ if row.core.background => None,
            ("dpdk-lib", _) => Some(Self::DpdkLib),
            (_, "cpu") => Some(Self::Cpu),
            (_, "offload") => Some(Self::Offload),
            _ => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "ours, the core copies",
            Self::Offload => "ours, an engine copies",
            Self::DpdkLib => "librte_vhost, the core copies",
            Self::GuideCore => "the guide's, software",
            Self::GuideDsa => "the guide's, DSA",
        }
    }

    const fn colour(self) -> RGBColor {
        match self {
            Self::Cpu => RGBColor(0, 114, 178),
            Self::Offload => RGBColor(213, 94, 0),
            Self::DpdkLib | Self::GuideCore => RGBColor(90, 90, 90),
            Self::GuideDsa => RGBColor(0, 158, 115),
        }
    }
}

/// A line of a panel.
#[derive(Debug)]
struct Line {
    series: Series,
    points: Vec<(f64, f64)>,
}

/// A coordinate system.
#[derive(Debug)]
struct Panel {
    title: String,
    lines: Vec<Line>,
}

/// Texts of a drawing outside its panels.
#[derive(Debug)]
struct Words {
    title: &'static str,
    meaning: &'static str,
    x: &'static str,
    y: &'static str,
}

/// Draws TSC cycles per packet over the frame length. Each temperature, case and ring format has a panel. The lines are
/// ours with the core copying, ours with an engine copying, and librte_vhost, if `rows` contains them.
///
/// # Errors
/// If no row belongs to the core-cost arrangement with case `loop` or `guest-to-guest`, or the file cannot be written.
pub fn core_cost(rows: &[Row], path: &Path) -> Result<()> {
    let cases = [Route::Loop, Route::GuestToGuest].map(Route::name);
    let wanted = |row: &&Row| row.head.arrangement == "core-cost" && cases.contains(&row.head.case.as_str());
    let rows: Vec<_> = rows.iter().filter(wanted).collect();
    let kinds = distinct(rows.iter().map(|row| (row.head.case.as_str(), row.head.ring)));
    let panels = kinds.iter().flat_map(|&kind| Temperature::ALL.map(|temperature| (kind, temperature)));
    let panels = panels.filter_map(|(kind, temperature)| {
        let of = |row: &&&Row| {
            (row.head.case.as_str(), row.head.ring) == kind && row.head.temperature == temperature.name()
        };
        let title = match kinds.len() {
            1 => temperature_title(temperature),
            _ => format!("{}, {}, {}", kind.0, kind.1, temperature_title(temperature)),
        };
        panel(
            title,
            rows.iter().filter(of).map(|row| (*row, row.head.frame as f64, row.figures.cycles_per_packet)),
        )
    });
    let words = Words {
        title: "Core cost of forwarding a guest's packet",
        meaning: "Medians, in TSC cycles, not core cycles. The core cost does not include the time of an engine.",
        x: "frame length in bytes, including FCS",
        y: "TSC cycles per packet",
    };
    draw(&words, &panels.collect::<Vec<_>>(), path)
}

/// Draws Gbit/s over the frame length for the packet-copy forwarder's core. Each temperature has a panel. The lines are
/// ours with the core copying, ours with an engine copying, and the guide's figures, if `rows` contains them.
///
/// # Errors
/// If no row belongs to the core-cost arrangement, or the file cannot be written.
pub fn packet_copy(rows: &[Row], path: &Path) -> Result<()> {
    let rows: Vec<_> =
        rows.iter().filter(|row| row.head.arrangement == "core-cost" && row.head.case == "forward").collect();
    let panels = Temperature::ALL.into_iter().filter_map(|temperature| {
        let of = |row: &&&Row| row.head.temperature == temperature.name();
        let ours = rows.iter().filter(of).map(|row| (*row, row.head.frame as f64, row.figures.gbps));
        let mut panel = panel(temperature_title(temperature), ours)?;
        for (series, mode) in [(Series::GuideCore, "cpu"), (Series::GuideDsa, "offload")] {
            let theirs = rows.iter().filter(of).filter(|row| row.head.mode == mode);
            let mut points: Vec<_> =
                theirs.filter_map(|row| Some((row.head.frame as f64, row.published.published?))).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            points.dedup();
            if !points.is_empty() {
                panel.lines.push(Line { series, points });
            }
        }
        Some(panel)
    });
    let words = Words {
        title: "Rate of a core that copies every packet into a new buffer",
        meaning: "Ours: the core alone, no network card's driver. The guide's: an lcore of a Xeon Gold 6438N, two ports of 100 Gbit/s.",
        x: "frame length in bytes, including FCS",
        y: "Gbit/s",
    };
    draw(&words, &panels.collect::<Vec<_>>(), path)
}

/// Draws million packets per second that core and engine reach together over the application's work per packet. Each
/// ring format and frame length has a panel. The lines are the core copying and an engine copying.
///
/// # Errors
/// If no row belongs to case `work`, or the file cannot be written.
pub fn work_sweep(rows: &[Row], path: &Path) -> Result<()> {
    let rows: Vec<_> = rows.iter().filter(|row| row.head.case == "work").collect();
    let mut kinds = distinct(rows.iter().map(|row| (row.head.ring, row.head.frame)));
    // Split before packed, as in other outputs.
    kinds.sort_by_key(|&(ring, frame)| (std::cmp::Reverse(ring), frame));
    let formats = distinct(kinds.iter().map(|&(ring, _)| ring)).len();
    let panels = kinds.into_iter().filter_map(|(ring, frame)| {
        let rows = rows.iter().filter(|row| (row.head.ring, row.head.frame) == (ring, frame));
        let points = rows.map(|row| {
            (*row, row.figures.work_ns as f64, row.core.sustained_mpps.unwrap_or(row.figures.mpps))
        });
        panel(if formats > 1 { format!("{ring}, {frame} bytes") } else { format!("{frame} bytes") }, points)
    });
    let words = Words {
        title: "Rate of core and engine together with application work on every packet",
        meaning: "The smaller of the core's rate and the engine's; data written and read by the other core.",
        x: "work in nanoseconds per packet",
        y: "million packets per second",
    };
    draw(&words, &panels.collect::<Vec<_>>(), path)
}

/// Returns each value once, in the order of first appearance.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut all = Vec::new();
    for value in values {
        if !all.contains(&value) {
            all.push(value);
        }
    }
    all
}

fn temperature_title(temperature: Temperature) -> String {
    let where_it_is = match temperature {
        Temperature::Hot => "data in the core's own cache",
        Temperature::Remote => "data in the other core's cache",
        Temperature::Cold => "data in memory",
    };
    format!("{temperature}: {where_it_is}")
}

/// Creates a panel from points `(row, x, y)`, or returns `None` without points.
fn panel<'a>(title: String, points: impl Iterator<Item = (&'a Row, f64, f64)>) -> Option<Panel> {
    let mut lines: Vec<_> =
        Series::ALL.into_iter().map(|series| Line { series, points: Vec::new() }).collect();
    for (row, x, y) in points {
        let line = lines.iter_mut().find(|line| Some(line.series) == Series::of(row));
        if let Some(line) = line {
            line.points.push((x, y));
        }
    }
    lines.retain_mut(|line| {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        !line.points.is_empty()
    });
    (!lines.is_empty()).then_some(Panel { title, lines })
}

fn draw(words: &Words, panels: &[Panel], path: &Path) -> Result<()> {
    ensure!(!panels.is_empty(), "no rows to plot");
    let columns = panels.len().min(COLUMNS);
    let size = (
        PANEL.0 * u32::try_from(columns)?.max(2),
        HEAD + PANEL.1 * u32::try_from(panels.len().div_ceil(columns))?,
    );
    svg::write(path, size, |root| {
        let (head, body) = root.split_vertically(HEAD);
        draw_head(words, panels, &head)?;
        let rows = panels.len().div_ceil(columns);
        for (panel, area) in panels.iter().zip(body.split_evenly((rows, columns))) {
            draw_panel(words, panel, &area)?;
        }
        Ok(())
    })
}

fn draw_head(words: &Words, panels: &[Panel], area: &Area<'_>) -> Result<()> {
    area.draw_text(words.title, &("sans-serif", 20).into_font().color(&BLACK), (EDGE, 14))?;
    area.draw_text(words.meaning, &("sans-serif", 13).into_font().color(&BLACK.mix(0.7)), (EDGE, 42))?;
    let used = |series: &Series| panels.iter().any(|panel| panel.lines.iter().any(|l| l.series == *series));
    let mut x = EDGE;
    for series in Series::ALL.into_iter().filter(used) {
        let (y, colour) = (74, series.colour());
        area.draw(&PathElement::new([(x, y), (x + 28, y)], colour.stroke_width(2)))?;
        mark(area, series, (x + 14, y))?;
        let font = ("sans-serif", 14).into_font().color(&BLACK);
        area.draw_text(series.name(), &font, (x + 36, y - 8))?;
        // An estimate: without the font, a letter is assumed to be 7.5 pixels wide.
        x += 60 + i32::try_from(series.name().len())? * 15 / 2;
    }
    Ok(())
}

fn draw_panel(words: &Words, panel: &Panel, area: &Area<'_>) -> Result<()> {
    let all = || panel.lines.iter().flat_map(|line| &line.points);
    let right = all().map(|point| point.0).fold(0.0, f64::max);
    let top = all().map(|point| point.1).fold(0.0, f64::max);
    // Extended a little, so that the last point is not on the edge.
    let range = |reach: f64| 0.0..(reach * 1.05).max(1e-3);
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 15))
        .margin(10)
        .margin_right(20)
        .x_label_area_size(44)
        .y_label_area_size(58)
        .build_cartesian_2d(range(right), range(top))?;
    chart
        .configure_mesh()
        .x_desc(words.x)
        .y_desc(words.y)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| if top < 10.0 { format!("{y:.1}") } else { format!("{y:.0}") })
        .x_labels(9)
        .y_labels(8)
        .label_style(("sans-serif", 12))
        .axis_desc_style(("sans-serif", 13))
        .bold_line_style(BLACK.mix(0.12))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for line in &panel.lines {
        let style = line.series.colour().stroke_width(2);
        chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
        for point in &line.points {
            let at = chart.backend_coord(point);
            mark(area, line.series, relative(area, at))?;
        }
    }
    Ok(())
}

/// Converts a point of the whole drawing to a point of `area`.
fn relative(area: &Area<'_>, at: (i32, i32)) -> (i32, i32) {
    let (left, top) = area.get_base_pixel();
    (at.0 - left, at.1 - top)
}

/// Draws a point of a line.
fn mark(area: &Area<'_>, series: Series, at: (i32, i32)) -> Result<()> {
    let style = series.colour().filled();
    match series {
        Series::Cpu => area.draw(&Circle::new(at, 4, style)),
        Series::Offload => area.draw(&TriangleMarker::new(at, 6, style)),
        Series::DpdkLib | Series::GuideCore | Series::GuideDsa => {
            area.draw(&Rectangle::new([(at.0 - 3, at.1 - 3), (at.0 + 4, at.1 + 4)], style))
        }
    }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::tempdir::TempDir;

    fn row(case: &str, temperature: Temperature, engine: &str, frame: usize, cycles: f64) -> Row {
        let mut row = Row::new("vhost", case, "core-cost");
        (row.head.ring, row.head.frame) = ("split", frame);
        row.head.mode = if engine == "core:1" { "offload" } else { "cpu" }.into();
        (row.head.engine, row.head.temperature) = (engine.into(), temperature.name().into());
        row.figures.cycles_per_packet = cycles;
        row
    }

    #[test]
    fn series_and_temperatures_are_drawn() {
        let dir = TempDir::new().unwrap();
        let path = dir.file("cost.svg");
        let mut rows = Vec::new();
        for (temperature, factor) in Temperature::ALL.into_iter().zip([1.0, 3.0, 6.0]) {
            for (frame, bytes) in [(64, 64.0), (512, 512.0), (1518, 1518.0)] {
                rows.push(row("loop", temperature, "cpu", frame, 60.0 + factor * bytes / 16.0));
                rows.push(row("loop", temperature, "core:1", frame, 90.0));
                rows.push(row("loop", temperature, "dpdk-lib", frame, 90.0 + factor * bytes / 12.0));
            }
        }
        core_cost(&rows, &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for word in ["ours, the core copies", "ours, an engine copies", "librte_vhost", "remote: ", "FCS"] {
            assert!(svg.contains(word), "no {word} in {svg}");
        }
        // Nine points and one mark in the legend.
        assert_eq!(svg.matches("<circle").count(), 10);
        // Another format has separate panels, and rows with a background copier are not drawn.
        let (mut packed, mut beside) = (rows.clone(), rows.clone());
        packed.iter_mut().for_each(|row| row.head.ring = "packed");
        beside.iter_mut().for_each(|row| row.core.background = true);
        let both = [&rows[..], &packed, &beside].concat();
        let path = dir.file("packed.svg");
        core_cost(&both, &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert_eq!(svg.matches("<circle").count(), 19);
        assert!(svg.contains("loop, split, remote: ") && svg.contains("loop, packed, remote: "), "{svg}");
        // The legend names only measured series.
        let path = dir.file("one.svg");
        core_cost(&rows[..1], &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert!(!svg.contains("librte_vhost") && !svg.contains("cold"), "{svg}");
        assert_eq!(svg.matches("<circle").count(), 2);
    }

    #[test]
    fn the_guides_figures_are_drawn_beside_ours() {
        let dir = TempDir::new().unwrap();
        let path = dir.file("copy.svg");
        let mut rows = Vec::new();
        for (frame, software, dsa) in [(64, 18.0, 12.0), (1024, 44.0, 200.0)] {
            for (engine, published) in [("cpu", software), ("core:1", dsa)] {
                let mut row = row("forward", Temperature::Remote, engine, frame, 100.0);
                (row.figures.gbps, row.published.published) = (frame as f64 / 10.0, Some(published));
                rows.push(row);
            }
        }
        packet_copy(&rows, &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        for word in ["ours, the core copies", "the guide&apos;s, software", "the guide&apos;s, DSA", "Gbit/s"]
        {
            assert!(svg.contains(word) || svg.contains(&word.replace("&apos;", "'")), "no {word} in {svg}");
        }
        // Two points and one mark in the legend.
        assert_eq!(svg.matches("<circle").count(), 3);
        assert!(packet_copy(&rows[..0], &path).is_err());
    }

    #[test]
    fn sweep_has_a_panel_per_length() {
        let dir = TempDir::new().unwrap();
        let path = dir.file("work.svg");
        let mut rows = Vec::new();
        for frame in [512, 1518] {
            for work_ns in [0, 400, 1600] {
                let mut cpu = row("work", Temperature::Remote, "cpu", frame, 300.0);
                (cpu.figures.work_ns, cpu.figures.mpps) = (work_ns, 1e3 / (150.0 + work_ns as f64));
                rows.push(cpu);
            }
        }
        work_sweep(&rows, &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert!(
            svg.contains("512 bytes") && svg.contains("1518 bytes") && svg.contains("nanoseconds"),
            "{svg}"
        );
        assert!(core_cost(&rows, &path).is_err(), "no row of that case");
        assert!(work_sweep(&rows, &dir.path().join("no/such.svg")).is_err());
    }
}
