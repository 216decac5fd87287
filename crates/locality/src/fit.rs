//! Calibration records to a map.

use experts::{
    CalibrationFile, CalibrationRecord, ModelShape, PromptCounts, ShapeError, WireError,
};
use thiserror::Error;

use crate::calibration::Calibration;
use crate::cells;
use crate::config::{FitConfig, MAX_ITERATIONS, MAX_RESTARTS, MaskChoice};
use crate::dots::{PairDots, Source};
use crate::idf::idf;
use crate::kmeans::{self, Clusters, Points};
use crate::map::LocalityMap;
use crate::pairs;
use crate::panels::Panels;
use crate::parallel;
use crate::random::Random;
use crate::report::{FitReport, MaskStep, Phase, Progress, Quality, TransformReport};
use crate::rho::{self, Rater};
use crate::transform::Transform;

/// The most pairs that rho is computed over: their dot products are held per layer.
pub const MAX_PAIRS: u64 = 1 << 24;

/// Why there is no map.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum FitError {
    /// No cluster was asked for.
    #[error("expected at least 1 cluster, got 0")]
    NoClusters,
    /// More clusters than records.
    #[error("expected at least one calibration record per cluster, got {records} for {clusters}")]
    TooFewRecords {
        /// Records there are.
        records: usize,
        /// Clusters wanted.
        clusters: usize,
    },
    /// A record belongs to another model.
    #[error("calibration record {record}: {source}")]
    Record {
        /// Which, from 0.
        record: usize,
        /// What is wrong with it.
        source: ShapeError,
    },
    /// rho is needed but cannot be computed.
    #[error(
        "expected at least 3 calibration records with decode counts to choose {what}, got {rated}: record decode counts, or say which"
    )]
    NotRated {
        /// What was to be chosen by it.
        what: &'static str,
        /// Records with decode counts.
        rated: usize,
    },
    /// rho was computed but says nothing.
    #[error("expected records that differ from one another to choose {what}, got equal ones")]
    NoRanking {
        /// What was to be chosen by it.
        what: &'static str,
    },
    /// The transform asked for has no data.
    #[error("expected {transform} values in every calibration record, got {missing} without")]
    NoValues {
        /// The transform.
        transform: Transform,
        /// Records without.
        missing: usize,
    },
    /// A layer of a given mask does not exist, or there is none.
    #[error("expected a mask of distinct layers below {layers}, got {mask:?}")]
    Mask {
        /// MoE layers of the model.
        layers: u32,
        /// The mask that came.
        mask: Vec<u32>,
    },
    /// More work than a fit may make.
    #[error("expected at most {limit} {what}, got {got}")]
    Work {
        /// `restarts` or `iterations`.
        what: &'static str,
        /// The most.
        limit: usize,
        /// What was asked for.
        got: usize,
    },
    /// Too many pairs to hold in memory.
    #[error("expected at most {MAX_PAIRS} pairs, got {got}: sample fewer")]
    Pairs {
        /// Pairs asked for.
        got: u64,
    },
    /// The calibration data inside a map cannot be read.
    #[error("calibration data of the map: {0}")]
    Calibration(#[from] WireError),
}

/// Fits a locality map to calibration records.
///
/// The transform with the highest rho over all layers is taken among those that counts suffice for,
/// unless one is given; then layers are selected for it, then requests are clustered. `progress` is
/// called between steps, on the calling thread. The same records, settings and seed give the same
/// bits.
///
/// # Errors
/// See [`FitError`].
pub fn fit(
    calibration: &CalibrationFile,
    config: &FitConfig,
    progress: &mut dyn FnMut(Progress),
) -> Result<(LocalityMap, FitReport), FitError> {
    let shape = calibration.header.shape;
    let records: Vec<&CalibrationRecord> = calibration.records.iter().collect();
    check(shape, &records, config)?;
    let threads = config.threads.unwrap_or_else(parallel::available);

    let prompts: Vec<&PromptCounts> = records.iter().map(|record| &record.prompt).collect();
    let idf = idf(shape, &prompts, config.presence);
    let rating = Rating::new(shape, &records, &idf, config, threads)?;
    let rater = (rating.pairs.len() > 1).then(|| rating.rater());
    let rated = rating.transforms(rater.as_ref(), progress);
    let transform = choose_transform(&records, config, &rating, &rated.reports)?;
    let dots = rated
        .best
        .and_then(|(of, dots)| (of == transform).then_some(dots));
    let mask = choose_mask(
        shape,
        config,
        &rating,
        rater.as_ref(),
        dots.as_ref(),
        progress,
    )?;

    let settings = kmeans::Settings {
        clusters: config.clusters,
        clustering: config.clustering,
        restarts: config.restarts.max(1),
        max_iterations: config.max_iterations,
        seed: config.seed,
        threads,
    };
    let points = points(&records, transform, &mask.layers, &idf, shape);
    let clusters = cluster(&points, &settings, progress);
    let rho_all_layers = rated
        .reports
        .iter()
        .find_map(|report| report.rho.filter(|_| report.transform == transform));
    let quality = quality(&clusters, mask.rho, rho_all_layers);
    let report = FitReport {
        records: records.len(),
        rated_records: rating.records.len(),
        pairs: rating.pairs.len(),
        transforms: rated.reports,
        transform,
        layers: shape.layers,
        layers_kept: mask.layers.clone(),
        mask_path: mask.path,
        quality: quality.clone(),
        iterations: clusters.iterations,
        converged: clusters.converged,
    };
    let map = LocalityMap {
        model: calibration.header.model.clone(),
        shape,
        transform,
        weights: weights(&idf, &mask.layers, shape),
        idf,
        centroids: Panels::pack(
            mask.layers.len() * shape.experts as usize,
            &clusters.centroids,
        ),
        clustering: config.clustering,
        restarts: settings.restarts,
        max_iterations: config.max_iterations,
        seed: config.seed,
        calibration: pack(&records, transform, &mask.layers, shape),
        mask: mask.layers,
        quality,
    };
    Ok((map, report))
}

impl LocalityMap {
    /// Clusters the calibration requests anew, for another number of workers: same model,
    /// transform, IDF and layers, new centroids.
    ///
    /// # Errors
    /// [`FitError::TooFewRecords`] when `clusters` exceeds the calibration requests.
    pub fn refit(&self, clusters: usize, seed: u64) -> Result<Self, FitError> {
        let records = self.calibration.len();
        check_clusters(records, clusters)?;
        let settings = kmeans::Settings {
            clusters,
            clustering: self.clustering,
            restarts: self.restarts,
            max_iterations: self.max_iterations,
            seed,
            threads: parallel::available(),
        };
        let dimension = self.dimension();
        let mut rows = vec![0.0; records * dimension];
        match &self.calibration {
            Calibration::Values { values, .. } => rows.copy_from_slice(values),
            Calibration::Counts { .. } => {
                let kept: Vec<u32> = (0..self.mask.len() as u32).collect();
                let counts = self
                    .calibration
                    .unpack(kept_shape(self.shape, &self.mask))?;
                for (row, counts) in rows.chunks_exact_mut(dimension).zip(&counts) {
                    cells::fill(
                        self.transform,
                        &kept,
                        counts.counts().as_slice(),
                        self.shape.experts as usize,
                        &self.weights,
                        row,
                    );
                }
            }
        }
        for row in rows.chunks_exact_mut(dimension) {
            cells::normalise(row);
        }
        let clusters = kmeans::cluster(&Points::new(rows, dimension), &settings, &mut |_| ());
        let mut map = self.clone();
        map.quality = quality(&clusters, self.quality.rho, self.quality.rho_all_layers);
        map.centroids = Panels::pack(dimension, &clusters.centroids);
        map.seed = seed;
        Ok(map)
    }
}

fn check(
    shape: ModelShape,
    records: &[&CalibrationRecord],
    config: &FitConfig,
) -> Result<(), FitError> {
    check_clusters(records.len(), config.clusters)?;
    check_work(config.restarts, config.max_iterations)?;
    for (record, it) in records.iter().enumerate() {
        let wrong = |source| FitError::Record { record, source };
        shape.expect(it.shape()).map_err(wrong)?;
        if let Some(decode) = &it.decode {
            shape.expect(decode.shape()).map_err(wrong)?;
        }
        for values in [&it.gate_probabilities, &it.gate_logits]
            .into_iter()
            .flatten()
        {
            if values.len() != shape.cells() {
                return Err(wrong(ShapeError::Length {
                    shape,
                    expected: shape.cells(),
                    got: values.len(),
                }));
            }
        }
    }
    match config.transform {
        Some(transform) => match missing(records, transform) {
            0 => Ok(()),
            missing => Err(FitError::NoValues { transform, missing }),
        },
        None => Ok(()),
    }
}

/// Bounds what a fit, or a refit of the map that it gives, may take.
pub(crate) fn check_work(restarts: usize, iterations: usize) -> Result<(), FitError> {
    for (what, limit, got) in [
        ("restarts", MAX_RESTARTS, restarts),
        ("iterations", MAX_ITERATIONS, iterations),
    ] {
        if got > limit {
            return Err(FitError::Work { what, limit, got });
        }
    }
    Ok(())
}

fn check_clusters(records: usize, clusters: usize) -> Result<(), FitError> {
    if clusters == 0 {
        Err(FitError::NoClusters)
    } else if records < clusters {
        Err(FitError::TooFewRecords { records, clusters })
    } else {
        Ok(())
    }
}

/// Records that lack what a transform needs.
fn missing(records: &[&CalibrationRecord], transform: Transform) -> usize {
    let has = |record: &CalibrationRecord| match transform {
        Transform::GateProbability => record.gate_probabilities.is_some(),
        Transform::GateLogit => record.gate_logits.is_some(),
        _ => true,
    };
    records.iter().filter(|record| !has(record)).count()
}

/// rho over the records that have decode counts.
struct Rating<'a> {
    records: Vec<&'a CalibrationRecord>,
    pairs: Vec<[u32; 2]>,
    idf: &'a [f32],
    shape: (usize, usize),
    threads: usize,
    /// The transform asked for.
    wanted: Option<Transform>,
}

struct Rated {
    reports: Vec<TransformReport>,
    /// The dots of the transform that was asked for, or of the best that counts suffice for.
    best: Option<(Transform, PairDots)>,
}

impl<'a> Rating<'a> {
    fn new(
        shape: ModelShape,
        records: &[&'a CalibrationRecord],
        idf: &'a [f32],
        config: &FitConfig,
        threads: usize,
    ) -> Result<Self, FitError> {
        let records: Vec<_> = records
            .iter()
            .copied()
            .filter(|record| record.decode.is_some())
            .collect();
        let total = pairs::count(records.len());
        let got = config.pairs.map_or(total, |n| total.min(n as u64));
        if got > MAX_PAIRS {
            return Err(FitError::Pairs { got });
        }
        let pairs = pairs::choose(
            records.len(),
            config.pairs,
            &mut Random::new(config.seed, 0),
        );
        Ok(Self {
            records,
            pairs,
            idf,
            shape: (shape.layers as usize, shape.experts as usize),
            threads,
            wanted: config.transform,
        })
    }

    fn dots(&self, source: Source<'_>) -> PairDots {
        PairDots::compute(&self.records, source, self.shape, &self.pairs, self.threads)
    }

    fn rater(&self) -> Rater<'_> {
        Rater::new(&self.pairs, &self.dots(Source::Decode))
    }

    /// Rates all six transforms.
    fn transforms(&self, rater: Option<&Rater<'_>>, progress: &mut dyn FnMut(Progress)) -> Rated {
        let total = Transform::ALL.len();
        let mut reports = Vec::with_capacity(total);
        let mut best: Option<(f64, Transform, PairDots)> = None;
        for (done, transform) in Transform::ALL.into_iter().enumerate() {
            progress(Progress {
                phase: Phase::Transforms,
                done,
                total,
            });
            let (rho, left_out) = match (rater, missing(&self.records, transform)) {
                (None, _) => (None, Some("no decode counts to rate it by".to_owned())),
                (Some(rater), 0) => {
                    let dots = self.dots(Source::Prompt(transform, self.idf));
                    let rho = rater.rho(&dots, 0..dots.layers());
                    let candidate = match self.wanted {
                        Some(wanted) => wanted == transform,
                        None => transform.needs_counts_only() && rho.is_some(),
                    };
                    let value = rho.unwrap_or(-2.0);
                    if candidate && best.as_ref().is_none_or(|&(most, ..)| value > most) {
                        best = Some((value, transform, dots));
                    }
                    let why = "all records are alike, or all pairs equally far apart";
                    (rho, rho.is_none().then(|| why.to_owned()))
                }
                (Some(_), missing) => {
                    let why = format!("{missing} of {} records lack its data", self.records.len());
                    (None, Some(why))
                }
            };
            reports.push(TransformReport {
                transform,
                rho,
                left_out,
            });
        }
        progress(Progress {
            phase: Phase::Transforms,
            done: total,
            total,
        });
        Rated {
            reports,
            best: best.map(|(_, transform, dots)| (transform, dots)),
        }
    }
}

fn choose_transform(
    records: &[&CalibrationRecord],
    config: &FitConfig,
    rating: &Rating<'_>,
    reports: &[TransformReport],
) -> Result<Transform, FitError> {
    if let Some(transform) = config.transform {
        return Ok(transform);
    }
    let what = "a transform";
    if rating.pairs.len() < 2 {
        return Err(FitError::NotRated {
            what,
            rated: rating.records.len(),
        });
    }
    reports
        .iter()
        .filter(|report| {
            report.transform.needs_counts_only() && missing(records, report.transform) == 0
        })
        .filter_map(|report| report.rho.map(|rho| (rho, report.transform)))
        .reduce(|best, next| if next.0 > best.0 { next } else { best })
        .map(|(_, transform)| transform)
        .ok_or(FitError::NoRanking { what })
}

struct Mask {
    layers: Vec<u32>,
    path: Vec<MaskStep>,
    rho: Option<f64>,
}

fn choose_mask(
    shape: ModelShape,
    config: &FitConfig,
    rating: &Rating<'_>,
    rater: Option<&Rater<'_>>,
    dots: Option<&PairDots>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Mask, FitError> {
    let rated = rater.zip(dots);
    let given = |layers: Vec<u32>| {
        let rho = rated
            .and_then(|(rater, dots)| rater.rho(dots, layers.iter().map(|&layer| layer as usize)));
        Mask {
            layers,
            path: Vec::new(),
            rho,
        }
    };
    match &config.mask {
        MaskChoice::All => Ok(given((0..shape.layers).collect())),
        MaskChoice::Layers(layers) => {
            let mut sorted = layers.clone();
            sorted.sort_unstable();
            let distinct = sorted.windows(2).all(|two| two[0] != two[1]);
            if !distinct || sorted.last().is_none_or(|&last| last >= shape.layers) {
                return Err(FitError::Mask {
                    layers: shape.layers,
                    mask: layers.clone(),
                });
            }
            Ok(given(sorted))
        }
        MaskChoice::Greedy => {
            let what = "layers";
            let Some((rater, dots)) = rated else {
                return Err(FitError::NotRated {
                    what,
                    rated: rating.records.len(),
                });
            };
            let total = shape.layers as usize;
            let path = rater.greedy(dots, rating.threads, &mut |done| {
                progress(Progress {
                    phase: Phase::Mask,
                    done,
                    total,
                });
            });
            let (layers, rho) = rho::peak(&path).ok_or(FitError::NoRanking { what })?;
            Ok(Mask {
                layers,
                path,
                rho: Some(rho),
            })
        }
    }
}

/// The signatures of all records.
fn points(
    records: &[&CalibrationRecord],
    transform: Transform,
    mask: &[u32],
    idf: &[f32],
    shape: ModelShape,
) -> Points {
    let experts = shape.experts as usize;
    let dimension = mask.len() * experts;
    let source = Source::Prompt(transform, idf);
    let mut rows = vec![0.0; records.len() * dimension];
    for (row, record) in rows.chunks_exact_mut(dimension).zip(records) {
        for (cells, &layer) in row.chunks_exact_mut(experts).zip(mask) {
            source.fill(record, layer as usize, cells);
        }
        cells::normalise(row);
    }
    Points::new(rows, dimension)
}

fn cluster(
    points: &Points,
    settings: &kmeans::Settings,
    progress: &mut dyn FnMut(Progress),
) -> Clusters {
    kmeans::cluster(points, settings, &mut |done| {
        progress(Progress {
            phase: Phase::Clusters,
            done,
            total: settings.restarts,
        });
    })
}

fn quality(clusters: &Clusters, rho: Option<f64>, rho_all_layers: Option<f64>) -> Quality {
    let count = clusters.centroids.len() / clusters.dimension.max(1);
    let mut cluster_sizes = vec![0; count];
    for &label in &clusters.labels {
        cluster_sizes[label as usize] += 1;
    }
    let centroids: Vec<&[f32]> = clusters
        .centroids
        .chunks_exact(clusters.dimension.max(1))
        .collect();
    let mut between = 0.0;
    for (i, a) in centroids.iter().enumerate() {
        for b in &centroids[i + 1..] {
            let dot: f32 = a.iter().zip(*b).map(|(a, b)| a * b).sum();
            between += f64::from(dot);
        }
    }
    let pairs = pairs::count(count);
    // To 9 decimals: such numbers survive any decimal form, so a map read is the map written.
    let round = |figure: f64| (figure * 1e9).round() / 1e9;
    Quality {
        rho: rho.map(round),
        rho_all_layers: rho_all_layers.map(round),
        cluster_sizes,
        within_similarity: round(clusters.similarity / clusters.labels.len().max(1) as f64),
        between_similarity: (pairs > 0).then(|| round(between / pairs as f64)),
    }
}

/// The IDF of the layers kept.
pub(crate) fn weights(idf: &[f32], mask: &[u32], shape: ModelShape) -> Vec<f32> {
    let experts = shape.experts as usize;
    mask.iter()
        .flat_map(|&layer| &idf[layer as usize * experts..(layer as usize + 1) * experts])
        .copied()
        .collect()
}

/// The shape of counts that hold the layers kept alone.
pub(crate) fn kept_shape(shape: ModelShape, mask: &[u32]) -> ModelShape {
    ModelShape {
        layers: mask.len() as u32,
        ..shape
    }
}

/// What a refit needs of the records.
fn pack(
    records: &[&CalibrationRecord],
    transform: Transform,
    mask: &[u32],
    shape: ModelShape,
) -> Calibration {
    let experts = shape.experts as usize;
    let kept = |values: &[f32]| -> Vec<f32> {
        mask.iter()
            .flat_map(|&layer| &values[layer as usize * experts..(layer as usize + 1) * experts])
            .copied()
            .collect()
    };
    let values = |of: fn(&CalibrationRecord) -> Option<&Vec<f32>>| Calibration::Values {
        dimension: mask.len() * experts,
        values: records
            .iter()
            .filter_map(|record| of(record))
            .flat_map(|values| kept(values))
            .collect(),
    };
    match transform {
        Transform::GateProbability => values(|record| record.gate_probabilities.as_ref()),
        Transform::GateLogit => values(|record| record.gate_logits.as_ref()),
        _ => Calibration::pack(records.iter().map(|record| record.prompt.keep_layers(mask))),
    }
}
