//! Dates in prompts: `strftime_now`.

use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A point in time, split into calendar fields (UTC).
struct Civil {
    year: i64,
    month: usize, // from 1
    day: usize,   // from 1
    weekday: usize,
    day_of_year: usize, // from 1
    hour: i64,
    minute: i64,
    second: i64,
}

impl Civil {
    fn new(time: SystemTime) -> Self {
        let seconds = match time.duration_since(UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
            Err(before) => i64::try_from(before.duration().as_secs()).map_or(i64::MIN, |s| -s),
        };
        // Ten thousand years either way, the range that four-digit calendars can print.
        let seconds = seconds.clamp(-315_000_000_000, 315_000_000_000);
        let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        let (mut year, mut left) = (1970 + days.div_euclid(146_097) * 400, days.rem_euclid(146_097));
        while left >= days_in_year(year) {
            left -= days_in_year(year);
            year += 1;
        }
        let day_of_year = left as usize + 1;
        let mut month = 1;
        while left >= days_in_month(year, month) {
            left -= days_in_month(year, month);
            month += 1;
        }
        Self {
            year,
            month,
            day: left as usize + 1,
            weekday: (days + 4).rem_euclid(7) as usize, // 1970-01-01 was a Thursday
            day_of_year,
            hour: of_day / 3600,
            minute: of_day / 60 % 60,
            second: of_day % 60,
        }
    }
}

fn is_leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn days_in_year(year: i64) -> i64 {
    if is_leap(year) { 366 } else { 365 }
}

fn days_in_month(year: i64, month: usize) -> i64 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if is_leap(year) => 29,
        2 => 28,
        _ => 31,
    }
}

/// Formats a time as C's `strftime` does in the C locale. Unknown codes are copied unchanged.
pub(super) fn strftime(time: SystemTime, format: &str) -> String {
    use std::fmt::Write as _;
    let t = Civil::new(time);
    let (day_name, month_name) = (DAYS[t.weekday], MONTHS[t.month - 1]);
    let hour_12 = (t.hour + 11) % 12 + 1;
    let half = if t.hour < 12 { "AM" } else { "PM" };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let Some(code) = chars.next() else {
            out.push('%');
            break;
        };
        // Writing to a String cannot fail.
        let _ = match code {
            'Y' => write!(out, "{:04}", t.year),
            'y' => write!(out, "{:02}", t.year.rem_euclid(100)),
            'm' => write!(out, "{:02}", t.month),
            'd' => write!(out, "{:02}", t.day),
            'e' => write!(out, "{:2}", t.day),
            'j' => write!(out, "{:03}", t.day_of_year),
            'H' => write!(out, "{:02}", t.hour),
            'I' => write!(out, "{hour_12:02}"),
            'M' => write!(out, "{:02}", t.minute),
            'S' => write!(out, "{:02}", t.second),
            'p' => write!(out, "{half}"),
            'A' => write!(out, "{day_name}"),
            'a' => write!(out, "{}", &day_name[..3]),
            'B' => write!(out, "{month_name}"),
            'b' | 'h' => write!(out, "{}", &month_name[..3]),
            'w' => write!(out, "{}", t.weekday),
            'F' => write!(out, "{:04}-{:02}-{:02}", t.year, t.month, t.day),
            'T' => write!(out, "{:02}:{:02}:{:02}", t.hour, t.minute, t.second),
            'D' => write!(out, "{:02}/{:02}/{:02}", t.month, t.day, t.year.rem_euclid(100)),
            'R' => write!(out, "{:02}:{:02}", t.hour, t.minute),
            'Z' => write!(out, "UTC"),
            'z' => write!(out, "+0000"),
            'n' => writeln!(out),
            't' => write!(out, "\t"),
            '%' => write!(out, "%"),
            other => write!(out, "%{other}"),
        };
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn dates_print_as_python_prints_them() {
        assert_eq!(strftime(at(0), "%d %b %Y, %A %H:%M:%S"), "01 Jan 1970, Thursday 00:00:00");
        assert_eq!(strftime(at(951_782_400), "%F %j %a"), "2000-02-29 060 Tue");
        assert_eq!(strftime(at(1_721_999_130), "%B %e, %y %I:%M %p %%"), "July 26, 24 01:05 PM %");
        assert_eq!(strftime(at(1_735_689_599), "%F %T"), "2024-12-31 23:59:59");
        assert_eq!(strftime(UNIX_EPOCH - Duration::from_secs(1), "%F %T"), "1969-12-31 23:59:59");
    }

    #[test]
    fn unknown_codes_and_a_trailing_percent_are_kept() {
        assert_eq!(strftime(at(0), "%Q 100%"), "%Q 100%");
    }
}
