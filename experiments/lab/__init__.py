"""What every table shares: data sets, tasks, methods, stored answers, records and pages."""
