//! How a worker is set up.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use engine::EngineConfig;

/// Which halves of a handoff a worker takes part in. Requests without a handoff are served by every worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// Computes prompts for others.
    Prefill,
    /// Takes prompts over from others.
    Decode,
    /// Either.
    #[default]
    Both,
}

impl Role {
    /// Whether the worker holds blocks for others.
    pub(crate) fn sends(self) -> bool {
        self != Self::Decode
    }

    /// Whether the worker takes blocks from others.
    pub(crate) fn receives(self) -> bool {
        self != Self::Prefill
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        })
    }
}

impl std::str::FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "prefill" => Ok(Self::Prefill),
            "decode" => Ok(Self::Decode),
            "both" => Ok(Self::Both),
            other => Err(format!(
                "expected `prefill`, `decode` or `both`, got `{other}`"
            )),
        }
    }
}

/// A worker's settings.
#[derive(Debug, Clone)]
pub struct Config {
    /// A Hugging Face directory: config.json, safetensors, tokenizer.json.
    pub model_dir: PathBuf,
    /// The name to serve the model under; the directory's name unless told.
    pub served_model_name: Option<String>,
    /// Which halves of a handoff it takes part in.
    pub role: Role,
    /// Where to serve HTTP; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where to give KV blocks to peers; port 0 takes a free one.
    pub transfer_listen: SocketAddr,
    /// The host that peers are told to pull from. Unless told, the address of `transfer_listen`, or of `listen` where that one is unspecified
    /// (`0.0.0.0`), or else the loopback address, which only peers on the same machine can use.
    pub transfer_host: Option<String>,
    /// Pads each expert's intermediate size this many times with zeros; 1 does not. The same bits come out.
    pub expert_padding: usize,
    /// Sizes of the engine.
    pub engine: EngineConfig,
    /// How long blocks are held for a peer.
    pub lease: Duration,
    /// How long each stage of a transfer of blocks may take.
    pub transfer_timeout: Duration,
    /// How long running requests may go on after the signal to shut down.
    pub grace: Duration,
}

impl Config {
    /// A worker for the model in `model_dir` on free ports of the loopback interface, everything else as it is by default.
    pub fn new(model_dir: impl Into<PathBuf>) -> Self {
        let free = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            model_dir: model_dir.into(),
            served_model_name: None,
            role: Role::default(),
            listen: free,
            transfer_listen: free,
            transfer_host: None,
            expert_padding: 1,
            engine: EngineConfig::default(),
            lease: Duration::from_secs(30),
            transfer_timeout: Duration::from_secs(10),
            grace: Duration::from_secs(30),
        }
    }

    /// The name that the model is served under.
    pub(crate) fn model_name(&self) -> String {
        let directory = || {
            let name = self.model_dir.file_name()?;
            Some(name.to_string_lossy().into_owned())
        };
        self.served_model_name
            .clone()
            .or_else(directory)
            .unwrap_or_else(|| "model".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_names_the_model_unless_told() {
        let mut config = Config::new("/models/demo/");
        assert_eq!(config.model_name(), "demo");
        config.served_model_name = Some("m".into());
        assert_eq!(config.model_name(), "m");
    }

    #[test]
    fn roles_go_round() {
        for role in [Role::Prefill, Role::Decode, Role::Both] {
            assert_eq!(role.to_string().parse(), Ok(role));
        }
        assert!("other".parse::<Role>().is_err());
    }
}
