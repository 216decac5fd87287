//! `colocate demo`: the same requests under each decode policy, compared.
//!
//! What makes the comparison fair:
//!
//! - every policy gets the same requests, drawn once from the seed, and the policies' order is rotated from round to round, so that no
//!   policy always runs first; figures are medians over rounds;
//! - decode workers keep no prefix cache, so that no policy profits from sending a prompt where it was before;
//! - the prefill worker does, and one round whose figures are thrown away comes first: after it every policy finds the same warm
//!   cache, and this machine's few cores spend their time on what the policies differ in, decoding;
//! - outputs of every round are compared token by token with those of one worker that serves all requests alone.

mod measure;
mod report;

use std::{path::PathBuf, time::Instant};

use anyhow::{Context, Result, anyhow, bail};
use routing::DecodePolicyName;
use workload::{Arrivals, Mix, Workload};

use crate::{
    client::{Client, Sampling},
    cluster::{Caching, Cluster, ClusterArgs},
    files, fitting,
    load::{self, Plan},
    logging,
    output::{self, BadUsage, Verdict},
    process::{WorkerProcess, WorkerSpec},
    progress::Progress,
    stop,
};
use measure::{Bench, Outputs};
use report::{MapReport, Report, Seconds};

/// Requests in flight per decode worker, unless told.
const IN_FLIGHT_PER_WORKER: usize = 16;

/// KV blocks of the prefill worker: enough to keep the prompts of a round.
const PREFILL_BLOCKS: usize = 8192;

/// Arguments of `colocate demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Requests in a round [default: 40 per decode worker]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,
    /// Requests arriving per second, as a Poisson process, instead of a fixed number in flight
    #[arg(long, value_name = "PER_SECOND", conflicts_with = "concurrency", value_parser = rate)]
    rate: Option<f64>,
    /// Requests in flight [default: 16 per decode worker]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: Option<u32>,
    /// Most tokens generated per request; lengths are drawn from half of it to all of it
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..))]
    max_tokens: u32,
    /// Temperature of the draws; 0 takes the likeliest token every time
    #[arg(long, default_value_t = Sampling::DEFAULT_TEMPERATURE, value_parser = Sampling::temperature)]
    temperature: f64,
    /// Rounds per policy [default: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Decode policies to compare: round_robin, random, power_of_two, least_loaded, domain, locality
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_values_t = [
            DecodePolicyName::RoundRobin,
            DecodePolicyName::LeastLoaded,
            DecodePolicyName::PowerOfTwo,
            DecodePolicyName::Domain,
            DecodePolicyName::Locality,
        ]
    )]
    policies: Vec<DecodePolicyName>,
    /// Which prompts: of tasks, of languages, or all
    #[arg(long, value_name = "task|language|mixed", default_value = "mixed", value_parser = mix)]
    workload: Mix,
    /// Prompts to serve, JSONL [default: prompts/evaluation.jsonl of the model]
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Prompts to fit the locality map on, JSONL [default: prompts/calibration.jsonl of the model]
    #[arg(long, value_name = "FILE")]
    calibration_prompts: Option<PathBuf>,
    /// A short form: fewer requests and one round, enough to see that everything works
    #[arg(long)]
    short: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

impl Args {
    fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            seed: self.cluster.seed,
        }
    }
}

fn rate(text: &str) -> Result<f64, String> {
    let rate: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if rate.is_finite() && rate > 0.0 {
        Ok(rate)
    } else {
        Err("expected a number above 0".into())
    }
}

fn mix(text: &str) -> Result<Mix, String> {
    match text {
        "mixed" => Ok(Mix::Mixed),
        text => text
            .parse()
            .map(Mix::Only)
            .map_err(|_: String| "expected task, language or mixed".into()),
    }
}

/// Runs the demo.
pub(crate) async fn run(args: Args) -> Result<Verdict> {
    logging::start("warn");
    let stop = stop::on_signals()?;
    let model = files::model(args.cluster.model.as_deref())?;
    let settings = Settings::new(&args)?;
    let evaluation = files::model_prompts(args.prompts.as_deref(), &model, "evaluation")?;
    let mut calibration =
        files::model_prompts(args.calibration_prompts.as_deref(), &model, "calibration")?;
    if let Some(most) = settings.calibration_prompts {
        let few = workload::sequence(
            &calibration,
            Mix::Mixed,
            most.min(calibration.len()),
            args.cluster.seed,
        )?;
        calibration = few
            .into_iter()
            .map(|index| calibration[index].clone())
            .collect();
    }
    let plan = Plan::draw(
        &evaluation,
        args.workload,
        settings.requests,
        args.max_tokens,
        settings.arrivals,
        args.sampling(),
    )
    .map_err(|error| BadUsage(error.to_string()))?;

    let began = Instant::now();
    let starting = Progress.step(format!(
        "starting {} workers",
        args.cluster.decode_workers + 2
    ));
    let solo = WorkerSpec {
        expert_padding: args.cluster.expert_padding,
        prefix_cache: false,
        ..WorkerSpec::new("solo", &model, "both")
    };
    let (cluster, solo) = tokio::select! {
        started = async { tokio::try_join!(Cluster::start(&model, &args.cluster, Caching::Prefill { blocks: PREFILL_BLOCKS }), WorkerProcess::start(solo)) } => started?,
        () = stop.cancelled() => bail!("interrupted"),
    };
    drop(starting);
    let mut demo = Demo {
        args: &args,
        settings,
        cluster,
        solo,
        seconds: Seconds::default(),
    };
    demo.seconds.start = began.elapsed().as_secs_f64();
    let report = tokio::select! {
        report = demo.compare(&calibration, &plan) => report,
        () = stop.cancelled() => Err(anyhow!("interrupted")),
    };
    // A worker that died explains whatever else went wrong.
    let report = match (
        report,
        demo.cluster.check().and_then(|()| demo.solo.check()),
    ) {
        (Err(error), Err(dead)) if !stop.is_cancelled() => Err(error.context(dead)),
        (report, _) => report,
    };
    tokio::join!(demo.cluster.stop(), demo.solo.stop());
    let mut report = report?;
    report.seconds.total = began.elapsed().as_secs_f64();
    output::report(args.json, &report, || report.text())?;
    Ok(Verdict::from_checks(report.passed()))
}

/// What the arguments come to.
#[derive(Debug, Clone, Copy)]
struct Settings {
    requests: usize,
    rounds: usize,
    arrivals: Arrivals,
    /// Requests in flight where only the outputs count.
    concurrency: usize,
    /// How many calibration prompts are used; all when none.
    calibration_prompts: Option<usize>,
}

impl Settings {
    fn new(args: &Args) -> Result<Self> {
        let workers = usize::from(args.cluster.decode_workers);
        for (index, policy) in args.policies.iter().enumerate() {
            if args.policies[..index].contains(policy) {
                return Err(BadUsage(format!("--policies names {policy} twice")).into());
            }
        }
        let concurrency = args
            .concurrency
            .map_or(workers * IN_FLIGHT_PER_WORKER, |given| given as usize);
        Ok(Self {
            requests: args
                .requests
                .map_or(workers * if args.short { 20 } else { 40 }, |given| {
                    given as usize
                }),
            rounds: args
                .rounds
                .map_or(if args.short { 1 } else { 3 }, |given| given as usize),
            arrivals: args
                .rate
                .map_or(Arrivals::Closed { concurrency }, |rate| Arrivals::Open {
                    rate,
                }),
            concurrency,
            calibration_prompts: args.short.then_some(128),
        })
    }
}

struct Demo<'a> {
    args: &'a Args,
    settings: Settings,
    cluster: Cluster,
    /// Runs whole requests alone: records counts, and gives the outputs to compare with.
    solo: WorkerProcess,
    seconds: Seconds,
}

impl Demo<'_> {
    async fn compare(&mut self, calibration: &[workload::Prompt], plan: &Plan) -> Result<Report> {
        let solo = Client::connect(self.solo.url()).await?;
        let fitted = fitting::fit_live(
            &solo,
            calibration,
            self.cluster.decode.len(),
            self.args.sampling(),
            Progress,
        )
        .await?;
        self.seconds.calibrate = fitted.calibrate_seconds;
        self.seconds.fit = fitted.fit_seconds;
        let map_report = MapReport {
            calibration_prompts: calibration.len(),
            transform: fitted.report.transform,
            rho: fitted.report.quality.rho,
            layers_kept: fitted.report.layers_kept.len(),
            layers: fitted.report.layers,
        };

        let serving = Instant::now();
        let mut outputs = self.alone(&solo, plan).await?;
        let bench = Bench::new(
            &self.cluster,
            fitted.map,
            self.args.cluster.locality.config(),
            self.args.cluster.seed,
        )
        .await?;
        let policies = &self.args.policies;
        let bar = Progress.bar("warming up", plan.requests.len());
        let warm = plan.closed(self.settings.concurrency);
        let warmed = bench.round(policies[0], &warm, &mut outputs, &bar).await?;
        if warmed.failed > 0 {
            bail!(
                "{} of {} requests failed while warming up",
                warmed.failed,
                plan.requests.len()
            );
        }
        drop(bar);
        let mut rounds: Vec<_> = policies
            .iter()
            .map(|&policy| (policy, Vec::new()))
            .collect();
        for round in 0..self.settings.rounds {
            for turn in 0..policies.len() {
                let (policy, figures) = &mut rounds[(round + turn) % policies.len()];
                let label = format!("round {}/{}: {policy}", round + 1, self.settings.rounds);
                let bar = Progress.bar(label, plan.requests.len());
                figures.push(bench.round(*policy, plan, &mut outputs, &bar).await?);
                self.cluster.check()?;
            }
        }
        self.seconds.rounds = serving.elapsed().as_secs_f64();

        let policies = report::summarise(&rounds, plan.requests.len());
        Ok(Report {
            locality_vs_best_load_balancer: report::against_best(&policies),
            policies,
            outputs_identical: outputs.identical(),
            decode_workers: self.cluster.decode.len(),
            expert_padding: self.args.cluster.expert_padding.into(),
            requests: plan.requests.len(),
            model: solo.model().to_owned(),
            seed: self.args.cluster.seed,
            workload: match self.args.workload {
                Mix::Only(Workload::Task) => "task".into(),
                Mix::Only(Workload::Language) => "language".into(),
                Mix::Mixed => "mixed".into(),
            },
            rounds: self.settings.rounds,
            concurrency: self
                .args
                .rate
                .is_none()
                .then_some(self.settings.concurrency),
            rate: self.args.rate,
            max_tokens: self.args.max_tokens,
            temperature: self.args.temperature,
            map: map_report,
            seconds: self.seconds,
        })
    }

    /// What one worker answers that serves every request from beginning to end.
    async fn alone(&self, solo: &Client, plan: &Plan) -> Result<Outputs> {
        let bar = Progress.bar("one worker alone", plan.requests.len());
        let answers = load::run(solo, &plan.closed(self.settings.concurrency), &bar).await?;
        let mut tokens = Vec::with_capacity(answers.len());
        for (index, answer) in answers.into_iter().enumerate() {
            let answer = answer
                .with_context(|| format!("request {} failed on one worker alone", index + 1))?;
            tokens.push(answer.tokens);
        }
        Ok(Outputs::new(tokens))
    }
}
