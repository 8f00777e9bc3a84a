"""The ``vfl`` program: whole federations on one machine, studies, forecasts, reports and certificates."""
