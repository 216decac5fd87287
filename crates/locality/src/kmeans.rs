//! Spherical K-means, plain and balanced.

use crate::assign::{Capacity, assign, distance_cost};
use crate::cells;
use crate::config::Clustering;
use crate::panels::Panels;
use crate::parallel;
use crate::random::Random;
use crate::simd;

/// Unit vectors (or zero ones), row-major.
pub(crate) struct Points {
    rows: Vec<f32>,
    dimension: usize,
}

/// How to cluster.
pub(crate) struct Settings {
    pub(crate) clusters: usize,
    pub(crate) clustering: Clustering,
    pub(crate) restarts: usize,
    pub(crate) max_iterations: usize,
    pub(crate) seed: u64,
    pub(crate) threads: usize,
}

/// A finished run.
pub(crate) struct Clusters {
    /// `clusters x dimension`, unit rows.
    pub(crate) centroids: Vec<f32>,
    /// Cells of a centroid.
    pub(crate) dimension: usize,
    /// Each point's cluster.
    pub(crate) labels: Vec<u32>,
    /// Sum of each point's similarity to its centroid.
    pub(crate) similarity: f64,
    pub(crate) iterations: usize,
    pub(crate) converged: bool,
}

impl Points {
    /// Takes rows of `dimension` cells, already of length 1 or 0.
    pub(crate) fn new(rows: Vec<f32>, dimension: usize) -> Self {
        Self { rows, dimension }
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len().checked_div(self.dimension).unwrap_or(0)
    }

    fn row(&self, point: usize) -> &[f32] {
        &self.rows[point * self.dimension..(point + 1) * self.dimension]
    }

    /// Similarities of every point to one of them.
    fn similarities_to(&self, point: usize, threads: usize) -> Vec<f32> {
        let mut similarities = vec![0.0; self.len()];
        let seed = self.row(point);
        let rows = 64;
        let tasks = similarities
            .chunks_mut(rows)
            .zip(self.rows.chunks(rows * self.dimension))
            .collect();
        parallel::each(
            threads,
            tasks,
            || (),
            |(), (out, rows)| {
                simd::dispatch(
                    #[inline(always)]
                    || {
                        for (out, row) in out.iter_mut().zip(rows.chunks_exact(self.dimension)) {
                            *out = simd::dot(seed, row);
                        }
                    },
                );
            },
        );
        similarities
    }

    /// Similarities of every point to every centroid, `points x clusters`.
    fn similarities(&self, centroids: &[f32], threads: usize) -> Vec<f32> {
        let panels = Panels::pack(self.dimension, centroids);
        let clusters = panels.columns();
        let mut similarities = vec![0.0; self.len() * clusters];
        let rows = 64;
        let tasks = similarities
            .chunks_mut(rows * clusters)
            .zip(self.rows.chunks(rows * self.dimension))
            .collect();
        parallel::each(
            threads,
            tasks,
            || (),
            |(), (out, rows)| {
                panels.multiply_rows(rows, out);
            },
        );
        similarities
    }
}

/// Runs K-means `restarts` times and keeps the run with the largest total similarity, the first
/// among equals. `points` must be at least `clusters`, and `clusters` at least 1.
pub(crate) fn cluster(
    points: &Points,
    settings: &Settings,
    progress: &mut dyn FnMut(usize),
) -> Clusters {
    let mut best = run(points, settings, 0);
    progress(1);
    for restart in 1..settings.restarts {
        let next = run(points, settings, restart as u64);
        progress(restart + 1);
        if next.similarity > best.similarity {
            best = next;
        }
    }
    best
}

fn run(points: &Points, settings: &Settings, restart: u64) -> Clusters {
    let clusters = settings.clusters;
    let mut random = Random::new(settings.seed, 1 + restart);
    let seeds = seed(points, clusters, &mut random, settings.threads);
    let mut centroids: Vec<f32> = seeds
        .iter()
        .flat_map(|&point| points.row(point))
        .copied()
        .collect();
    let mut labels = Vec::new();
    let mut iterations = 0;
    let mut converged = false;
    while iterations < settings.max_iterations.max(1) && !converged {
        iterations += 1;
        let similarities = points.similarities(&centroids, settings.threads);
        let next = match settings.clustering {
            Clustering::Balanced => balanced(&similarities, clusters),
            Clustering::Plain => nearest(&similarities, clusters),
        };
        converged = next == labels;
        labels = next;
        if !converged {
            centroids = means(points, &labels, clusters);
        }
    }
    let similarities = points.similarities(&centroids, settings.threads);
    let own = labels.iter().zip(similarities.chunks_exact(clusters));
    Clusters {
        similarity: own.map(|(&k, row)| f64::from(row[k as usize])).sum(),
        centroids,
        dimension: points.dimension,
        labels,
        iterations,
        converged,
    }
}

/// k-means++: each seed is drawn with a probability proportional to its squared distance
/// (`2 (1 - cos)` between unit vectors) from the nearest seed so far.
///
/// A zero vector, which is as far from everything as can be, is never drawn while another will do.
fn seed(points: &Points, clusters: usize, random: &mut Random, threads: usize) -> Vec<usize> {
    let told: Vec<bool> = (0..points.len())
        .map(|point| points.row(point).iter().any(|&value| value != 0.0))
        .collect();
    let mut weights: Vec<f64> = told.iter().map(|&told| f64::from(u8::from(told))).collect();
    let mut chosen = vec![false; points.len()];
    let mut seeds = Vec::with_capacity(clusters);
    while seeds.len() < clusters {
        let point = draw(&weights, random).unwrap_or_else(|| {
            // All that is left lies on a seed already: any will do, zero vectors last.
            let rest = |wanted: bool| {
                let chosen = &chosen;
                let told = &told;
                (0..points.len()).filter(move |&p| !chosen[p] && told[p] == wanted)
            };
            let wanted = rest(true).next().is_some();
            let nth = random.below(rest(wanted).count().max(1) as u64);
            rest(wanted).nth(nth as usize).unwrap_or(0)
        });
        seeds.push(point);
        chosen[point] = true;
        let similarities = points.similarities_to(point, threads);
        for (p, &similarity) in similarities.iter().enumerate() {
            let distance = f64::from(1.0 - similarity);
            // Below rounding noise a point is its seed's double.
            let distance = if distance < 1e-6 { 0.0 } else { distance };
            weights[p] = match (chosen[p] || !told[p], seeds.len()) {
                (true, _) => 0.0,
                (false, 1) => distance,
                (false, _) => weights[p].min(distance),
            };
        }
    }
    seeds
}

fn draw(weights: &[f64], random: &mut Random) -> Option<usize> {
    let total: f64 = weights.iter().sum();
    if total <= 0.0 {
        return None;
    }
    let mut mark = random.unit() * total;
    let mut last = None;
    for (index, &weight) in weights.iter().enumerate() {
        if weight > 0.0 {
            last = Some(index);
            if mark < weight {
                break;
            }
            mark -= weight;
        }
    }
    last
}

/// The exact assignment to clusters of 1 to `ceil(N / K)` points.
fn balanced(similarities: &[f32], clusters: usize) -> Vec<u32> {
    let costs: Vec<i64> = similarities.iter().map(|&s| distance_cost(s)).collect();
    let capacity = Capacity {
        at_least: 1,
        at_most: (similarities.len() / clusters).div_ceil(clusters),
    };
    // N >= K and similarities of unit vectors leave nothing to fail.
    assign(&costs, clusters, capacity).unwrap_or_else(|_| nearest(similarities, clusters))
}

/// Each point's nearest centroid, the first among equals; an empty cluster then takes the point
/// that is farthest from its own centroid, from a cluster that has others.
fn nearest(similarities: &[f32], clusters: usize) -> Vec<u32> {
    let mut sizes = vec![0u32; clusters];
    let mut labels: Vec<u32> = similarities
        .chunks_exact(clusters)
        .map(|row| {
            let best = (0..clusters).reduce(|best, k| if row[k] > row[best] { k } else { best });
            best.unwrap_or(0) as u32
        })
        .collect();
    for &label in &labels {
        sizes[label as usize] += 1;
    }
    for empty in 0..clusters {
        if sizes[empty] > 0 {
            continue;
        }
        let own = |point: usize| similarities[point * clusters + labels[point] as usize];
        let farthest = (0..labels.len())
            .filter(|&point| sizes[labels[point] as usize] > 1)
            .reduce(|far, point| if own(point) < own(far) { point } else { far });
        if let Some(point) = farthest {
            sizes[labels[point] as usize] -= 1;
            sizes[empty] = 1;
            labels[point] = empty as u32;
        }
    }
    labels
}

/// The members' sum per cluster, scaled to length 1; zero where they cancel or say nothing.
fn means(points: &Points, labels: &[u32], clusters: usize) -> Vec<f32> {
    let dimension = points.dimension;
    let mut means = vec![0.0f32; clusters * dimension];
    simd::dispatch(
        #[inline(always)]
        || {
            for (point, &label) in labels.iter().enumerate() {
                let start = label as usize * dimension;
                let mean = &mut means[start..start + dimension];
                for (sum, &value) in mean.iter_mut().zip(points.row(point)) {
                    *sum += value;
                }
            }
            for mean in means.chunks_exact_mut(dimension.max(1)) {
                cells::normalise(mean);
            }
        },
    );
    means
}
