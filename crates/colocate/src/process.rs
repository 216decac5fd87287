//! Worker processes: this program, started again as `colocate worker`.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    task::JoinHandle,
    time::timeout,
};

/// How long a worker may take to load its model and listen.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long a worker may take to stop before it is killed.
const STOP_LIMIT: Duration = Duration::from_secs(3);
/// How many of a worker's last lines on standard error are kept for the message when it fails.
const KEPT_LINES: usize = 8;

/// The line that `colocate worker --json` prints once it listens.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Listening {
    /// Where it serves HTTP, for example `http://127.0.0.1:41234`.
    pub(crate) url: String,
    /// `prefill`, `decode` or `both`.
    pub(crate) role: String,
    /// The name under which it serves its model.
    pub(crate) model: String,
}

/// How to start a worker.
#[derive(Debug, Clone)]
pub(crate) struct WorkerSpec {
    /// What to call it in messages.
    pub(crate) name: String,
    /// The checkpoint's folder.
    pub(crate) model: PathBuf,
    /// `prefill`, `decode` or `both`.
    pub(crate) role: &'static str,
    /// How many times the experts' intermediate size is padded.
    pub(crate) expert_padding: u16,
    /// Whether prompts take up the blocks of earlier ones.
    pub(crate) prefix_cache: bool,
    /// KV blocks; the worker's default when none.
    pub(crate) num_blocks: Option<usize>,
    /// By how much it gives way to other processes (see `nice`); 0 is not at all.
    pub(crate) niceness: u8,
}

impl WorkerSpec {
    /// A worker with the model as it is.
    pub(crate) fn new(name: impl Into<String>, model: &Path, role: &'static str) -> Self {
        Self {
            name: name.into(),
            model: model.to_owned(),
            role,
            expert_padding: 1,
            prefix_cache: true,
            num_blocks: None,
            niceness: 0,
        }
    }
}

/// A worker process on a free port of its own, killed when this is dropped.
///
/// The process also ends when its standard input does, so nothing is left behind when this process dies, even by SIGKILL.
#[derive(Debug)]
pub(crate) struct WorkerProcess {
    name: String,
    url: String,
    model: String,
    child: Child,
    tail: Tail,
    readers: Vec<JoinHandle<()>>,
}

type Tail = Arc<Mutex<VecDeque<String>>>;

impl WorkerProcess {
    /// Starts a worker and waits until it listens.
    pub(crate) async fn start(spec: WorkerSpec) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut command = if spec.niceness == 0 {
            Command::new(program)
        } else {
            let mut nice = Command::new("nice");
            nice.args(["-n", &spec.niceness.to_string()]).arg(program);
            nice
        };
        let mut child = command
            .arg("worker")
            .arg("--model")
            .arg(&spec.model)
            .args([
                "--role",
                spec.role,
                "--port",
                "0",
                "--json",
                "--exit-with-parent",
            ])
            .args(["--expert-padding", &spec.expert_padding.to_string()])
            .args((!spec.prefix_cache).then_some("--no-prefix-cache"))
            .args(
                spec.num_blocks
                    .map(|blocks| format!("--num-blocks={blocks}")),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start worker {}", spec.name))?;
        let tail = Tail::default();
        let stdout = child
            .stdout
            .take()
            .context("a worker has no standard output")?;
        let stderr = child
            .stderr
            .take()
            .context("a worker has no standard error")?;
        let keeper = tokio::spawn(keep_tail(BufReader::new(stderr), Arc::clone(&tail)));
        let mut stdout = BufReader::new(stdout).lines();
        let first = timeout(START_LIMIT, stdout.next_line())
            .await
            .map_err(|_| {
                anyhow!(
                    "worker {} did not listen within {} s",
                    spec.name,
                    START_LIMIT.as_secs()
                )
            })?
            .with_context(|| format!("cannot read from worker {}", spec.name))?;
        let Some(line) = first else {
            let status = timeout(STOP_LIMIT, child.wait())
                .await
                .ok()
                .and_then(Result::ok);
            // Its last words may still be in the pipe.
            let _ = timeout(Duration::from_millis(500), keeper).await;
            bail!("{}", ended(&spec.name, status, &tail));
        };
        let listening: Listening = serde_json::from_str(&line).with_context(|| {
            format!(
                "worker {} printed {line:?} instead of its address",
                spec.name
            )
        })?;
        // Whatever it prints later is read and dropped, so that its pipe never fills up.
        let drain =
            tokio::spawn(async move { while let Ok(Some(_)) = stdout.next_line().await {} });
        Ok(Self {
            name: spec.name,
            url: listening.url,
            model: listening.model,
            child,
            tail,
            readers: vec![keeper, drain],
        })
    }

    /// Where it serves HTTP.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The name under which it serves its model.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// An error that says how the worker ended, if it has.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(anyhow!("{}", ended(&self.name, Some(status), &self.tail))),
            Err(error) => Err(error)
                .with_context(|| format!("cannot ask for the state of worker {}", self.name)),
        }
    }

    /// Asks the worker to stop, and kills it if it takes too long.
    pub(crate) async fn stop(mut self) {
        drop(self.child.stdin.take());
        if timeout(STOP_LIMIT, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
        for reader in &self.readers {
            reader.abort();
        }
    }
}

/// Stops workers side by side.
pub(crate) async fn stop_all(workers: impl IntoIterator<Item = WorkerProcess>) {
    futures::future::join_all(workers.into_iter().map(WorkerProcess::stop)).await;
}

async fn keep_tail(reader: impl tokio::io::AsyncBufRead + Unpin, tail: Tail) {
    let mut lines = reader.lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let mut tail = tail.lock().unwrap_or_else(PoisonError::into_inner);
        if tail.len() == KEPT_LINES {
            tail.pop_front();
        }
        tail.push_back(line);
    }
}

fn ended(name: &str, status: Option<ExitStatus>, tail: &Tail) -> String {
    let status = status.map_or_else(
        || "without a status".into(),
        |status| format!("with {status}"),
    );
    let lines: Vec<String> = tail
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .iter()
        .map(|line| format!("\n  {line}"))
        .collect();
    format!(
        "worker {name} ended {status}{}{}",
        if lines.is_empty() {
            ""
        } else {
            "; its last words:"
        },
        lines.concat()
    )
}
