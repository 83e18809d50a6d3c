//! Settings that `/set` changes during a chat.

use crate::fail::Hinted;
use refrain::{Model, SamplingParams};
use std::fmt;

/// The names that `/set` takes.
pub(super) const NAMES: [&str; 9] = [
    "temp",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "max_tokens",
];

pub(super) struct Settings {
    pub(super) sampling: SamplingParams,
    pub(super) max_tokens: Option<usize>,
}

impl Settings {
    pub(super) fn new(sampling: SamplingParams, max_tokens: Option<usize>) -> Settings {
        Settings { sampling, max_tokens }
    }

    /// Changes a setting: `temp 0.5` or `temp=0.5`. Returns the new value, or `None` if nothing was to be changed.
    pub(super) fn set(&mut self, change: &str, model: &Model) -> anyhow::Result<Option<String>> {
        let mut words = change.split(|c: char| c.is_whitespace() || c == '=').filter(|word| !word.is_empty());
        let Some(name) = words.next() else { return Ok(None) };
        let name = name.trim_start_matches('-').replace('-', "_");
        let known = || format!("settings are {}", NAMES.join(", "));
        if !NAMES.contains(&name.as_str()) {
            return Err(Hinted::new(format!("there is no setting {name}"), known()).into());
        }
        let (Some(value), None) = (words.next(), words.next()) else {
            return Err(
                Hinted::new(format!("/set {name} needs one value"), format!("/set {name} VALUE")).into()
            );
        };
        let bad = || Hinted::new(format!("{value} is not a value for {name}"), "give a number");
        let float = || value.parse::<f32>().map_err(|_| bad());
        let count = || value.parse::<usize>().map_err(|_| bad());
        let mut sampling = self.sampling.clone();
        let mut max_tokens = self.max_tokens;
        match name.as_str() {
            "temp" => sampling.temperature = float()?,
            "top_k" => sampling.top_k = count()?,
            "top_p" => sampling.top_p = float()?,
            "min_p" => sampling.min_p = float()?,
            "repeat_penalty" => sampling.repeat_penalty = float()?,
            "frequency_penalty" => sampling.frequency_penalty = float()?,
            "presence_penalty" => sampling.presence_penalty = float()?,
            "seed" if value == "-1" => sampling.seed = model.sampling().seed,
            "seed" => sampling.seed = value.parse().map_err(|_| bad())?,
            _ if value == "-1" => max_tokens = None,
            _ => max_tokens = Some(count()?),
        }
        sampling.check(model.config().n_vocab).map_err(refrain::Error::from)?;
        (self.sampling, self.max_tokens) = (sampling, max_tokens);
        Ok(Some(format!("{name} is {}", self.value(&name))))
    }

    fn value(&self, name: &str) -> String {
        let s = &self.sampling;
        match name {
            "temp" => s.temperature.to_string(),
            "top_k" => s.top_k.to_string(),
            "top_p" => s.top_p.to_string(),
            "min_p" => s.min_p.to_string(),
            "repeat_penalty" => s.repeat_penalty.to_string(),
            "frequency_penalty" => s.frequency_penalty.to_string(),
            "presence_penalty" => s.presence_penalty.to_string(),
            "seed" => s.seed.to_string(),
            _ => self.max_tokens.map_or_else(|| "unlimited".to_owned(), |n| n.to_string()),
        }
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |name: &&str| format!("{name:<18} {}", self.value(name));
        f.write_str(&NAMES.iter().map(line).collect::<Vec<_>>().join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_changed_by_name_and_checked() {
        let model = Model::builtin().unwrap();
        let mut settings = Settings::new(SamplingParams::default(), None);
        assert_eq!(settings.set("temp 0.5", &model).unwrap().unwrap(), "temp is 0.5");
        assert_eq!(settings.set("top-k = 7", &model).unwrap().unwrap(), "top_k is 7");
        assert_eq!(settings.set("max_tokens 9", &model).unwrap().unwrap(), "max_tokens is 9");
        assert_eq!(settings.set("max_tokens -1", &model).unwrap().unwrap(), "max_tokens is unlimited");
        assert_eq!((settings.sampling.temperature, settings.sampling.top_k), (0.5, 7));
        assert_eq!(settings.set("", &model).unwrap(), None);
        for (change, expected) in [
            ("heat 1", "no setting heat"),
            ("temp", "needs one value"),
            ("temp hot", "not a value"),
            ("temp -1", "must be 0 or more"),
        ] {
            let error = settings.set(change, &model).unwrap_err().to_string();
            assert!(error.contains(expected), "{change}: {error}");
        }
        assert_eq!(settings.sampling.temperature, 0.5, "a refused value changes nothing");
        assert_eq!(settings.to_string().lines().count(), NAMES.len());
    }
}
